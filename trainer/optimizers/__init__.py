"""Optimizers that torch has not, for large batches and for gradients that come late; each steps on one process as on many."""
