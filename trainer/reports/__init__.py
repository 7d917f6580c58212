"""What training reports: who holds up whom, the numbers of a step, a timeline."""
