"""Coordinates: monotone maps of columns, in front of bandwidths, kernels and backends."""

from .columns import Coordinates, candidates, check, fit, listed

__all__ = ["Coordinates", "candidates", "check", "fit", "listed"]
