"""What ranks exchange while they train, and when: a rule a file, on the buckets, codecs and checkpoints of trainer.gradients."""
