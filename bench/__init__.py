"""Measurements of collectives (`allreduce`, ...) and training steps (`step`), and simulated `hosts` to run them on."""
