"""The benchmark of GPUs: training steps, the host's time in a call, the overlap of codecs with backward, and every verb."""
