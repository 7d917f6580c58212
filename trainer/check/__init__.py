"""What works on this machine, and between it and another one: `python -m trainer.check`, also `gradwire check`."""
