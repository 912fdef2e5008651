"""The PyTorch backend: tensor operations in chunks on any of its devices, and derivatives of the reductions."""
