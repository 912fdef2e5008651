"""Coordinates: monotone maps of columns, in front of bandwidths, kernels and backends."""

from .columns import Coordinates, OfColumns, candidates, check, fit, listed, without_ends
from .support import check_support, images

__all__ = ["Coordinates", "OfColumns", "candidates", "check", "check_support", "fit", "images", "listed"]
__all__ += ["without_ends"]
