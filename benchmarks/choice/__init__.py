"""The grid of estimates that judges ``backend="auto"``: ``python -m benchmarks.choice``."""
