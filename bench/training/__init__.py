"""Benchmarks of training: the time of a step, and the effect of codecs on the loss."""
