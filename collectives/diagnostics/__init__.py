"""After a failure: who is to blame, told from what the ranks report."""
