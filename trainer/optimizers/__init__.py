"""Optimizers for large batches, which torch has not; each steps on one process as on many."""
