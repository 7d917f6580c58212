"""Data-parallel training on top of `gradwire.collectives`. `gradwire` itself has the public names."""
