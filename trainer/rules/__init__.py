"""What the ranks exchange in training, and when: a rule a file, built on gradwire.trainer.reducer. gradwire.rules lists them."""
