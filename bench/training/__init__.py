"""Training: how long a step takes, and what codecs do to the loss."""
