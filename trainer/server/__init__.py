"""The parameter server: what it decides, the shards that it holds, and what workers and servers say to each other."""
