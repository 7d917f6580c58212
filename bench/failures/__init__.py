"""Training through failures: `python -m gradwire.bench failures`."""
