"""`gradwire run`: starts the ranks of a job on one or several hosts, with a fixed or an elastic number of ranks."""
