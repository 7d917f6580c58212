"""The parameter server: what it decides, what it holds, and what workers and servers say to each other."""
