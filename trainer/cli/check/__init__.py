"""What works on this machine, and between it and another one: `gradwire check`."""
