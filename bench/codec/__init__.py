"""Benchmarks of single codecs, a copy, and torch's own operations."""
