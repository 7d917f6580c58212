"""What ranks exchange while they train, and when: a rule a file, on what is in gradwire.trainer.gradients."""
