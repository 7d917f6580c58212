"""Memory that the ranks of one host share: mapping, allocation, reductions and messages."""
