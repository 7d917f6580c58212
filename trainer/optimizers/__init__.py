"""Optimizers that torch lacks, for large batches and for late gradients. Each works with one process as with many."""
