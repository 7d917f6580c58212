"""Gradient codecs: what makes a chunk small before it is sent."""
