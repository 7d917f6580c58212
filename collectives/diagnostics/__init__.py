"""Diagnostics: the ranks to blame for a failure or a wait, and timelines of all ranks."""
