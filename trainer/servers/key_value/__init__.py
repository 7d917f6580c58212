"""The key-value store: the keys at the servers, and the workers' pushes and pulls."""
