"""The exchange of gradients: buckets, their codecs, the hooks that fill them, and the state in checkpoints."""
