"""The NumPy backend: matrix products and a streaming log-sum-exp on the CPU; needs nothing but NumPy."""
