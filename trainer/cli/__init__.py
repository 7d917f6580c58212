"""The command `gradwire`, which starts jobs, and tests, measures and describes gradwire from a shell."""
