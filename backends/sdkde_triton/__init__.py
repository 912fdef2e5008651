"""Tensor Core kernels in Triton for CUDA GPUs: a backend of sdkde."""
