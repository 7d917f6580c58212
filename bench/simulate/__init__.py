"""Predictions of training on ranks that do not exist here: the real plans, replayed over described links."""
