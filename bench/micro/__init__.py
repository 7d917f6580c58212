"""Benchmarks of one collective with all its algorithms, and with codecs, compared with torch.distributed and MPI."""
