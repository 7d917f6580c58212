"""Benchmarks of training by several update rules, at equal steps or in equal time."""
