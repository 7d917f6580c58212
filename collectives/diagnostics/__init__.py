"""Diagnostics: the ranks that cause a failure or a wait, and timelines of all ranks."""
