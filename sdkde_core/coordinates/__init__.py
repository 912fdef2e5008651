"""Coordinates: monotone maps of columns, in front of bandwidths, kernels and backends."""

from .columns import Coordinates, OfColumns, candidates, check, fit, listed, without_ends
from .support import check_support, images
