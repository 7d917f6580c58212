"""Benchmarks of one collective with all its algorithms, and with codecs, beside torch.distributed and MPI."""
