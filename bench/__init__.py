"""Measurements of collectives (`allreduce`, ...), codecs, training and update rules, and simulated `hosts` to run them on."""
