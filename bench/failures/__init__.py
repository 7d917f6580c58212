"""Benchmarks of training through failures: `python -m gradwire.bench failures`."""
