"""Measurements: collectives (`allreduce`, ...), training steps (`step`), and simulated hosts to run them on (`hosts`)."""
