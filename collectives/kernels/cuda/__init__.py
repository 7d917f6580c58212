"""Kernels for NVIDIA GPUs (CUDA C++). Other modules import only `kernels`."""
