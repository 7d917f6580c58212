"""Who is to blame for a failure or a wait, and what every rank did when."""
