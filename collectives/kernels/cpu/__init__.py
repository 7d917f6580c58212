"""Kernels for the CPU (Numba). Others load `shared_memory`, `tcp`, `quantize`, `sparse`, which gather the rest."""
