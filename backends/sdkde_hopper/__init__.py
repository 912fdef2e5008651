"""Kernels in CUDA C++ for NVIDIA's Hopper (compute capability 9.0), compiled when first used."""
