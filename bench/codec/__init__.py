"""Benchmarks of single codecs, beside a copy and torch's own operations."""
