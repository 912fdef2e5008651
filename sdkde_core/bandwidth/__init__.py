"""Bandwidths: the matrix and its maps, the rules, and what chooses one from the data."""
