"""A rank's shares of the parameters: the pieces that it steps, and how they come to the optimizer and to all ranks."""
