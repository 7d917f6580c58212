"""`gradwire report`: runs a training command, and writes a page of the measurements of its ranks."""
