"""A backend for sdkde in JAX: on the CPU, or any device that XLA compiles for."""
