"""The Numba backend: vectorised kernels compiled for the CPU at hand."""
