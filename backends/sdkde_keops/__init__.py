"""The KeOps backend of sdkde: symbolic pairs, compiled by KeOps for each dimension, on CPUs and CUDA GPUs."""
