"""How gradients travel: buckets, the codecs on them, the hooks that fill them, and what a checkpoint keeps."""
