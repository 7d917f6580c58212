"""Kernels for NVIDIA GPUs (CUDA C++). `kernels` is what others load."""
