"""Coordinates: monotone maps of columns, in front of bandwidths, kernels and backends."""

from .columns import Coordinates, candidates, check, fit, listed, without_ends
from .support import check_support, images

__all__ = ["Coordinates", "candidates", "check", "check_support", "fit", "images", "listed", "without_ends"]
