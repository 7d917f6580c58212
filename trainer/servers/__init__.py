"""Servers inside the ranks (ParameterServer, KVStore), and Hogwild: training in which ranks need not wait for all others."""
