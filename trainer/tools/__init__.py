"""Commands that look at a host or at a training run: `gradwire check` and `gradwire report`."""
