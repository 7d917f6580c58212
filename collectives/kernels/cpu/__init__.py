"""Kernels for the CPU (Numba). `shared_memory`, `quantize` and `sparse` gather what the other files define."""
