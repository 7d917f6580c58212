"""`gradwire check`: tests this host, and the network to another host."""
