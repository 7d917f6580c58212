"""The update rules: what ranks exchange in training, and when. One rule a file, built on gradwire.trainer.gradients."""
