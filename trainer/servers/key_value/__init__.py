"""The key-value store: its keys at the servers, and what workers push to them and pull."""
