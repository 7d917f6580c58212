"""Kernels for the CPU (Numba). The package above says which modules others load."""
