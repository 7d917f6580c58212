"""Prediction of training on ranks that nobody here has: the real plans, replayed over described links."""
