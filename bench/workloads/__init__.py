"""Models and data to train, the ways to train them on several ranks, and the loop in which all benchmarks train them."""
