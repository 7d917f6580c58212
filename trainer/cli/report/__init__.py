"""`gradwire report`: runs a training command, and makes a page of what its ranks have measured."""
