"""Coordinates: monotone maps of columns, in front of bandwidths, kernels and backends."""

from .columns import Coordinates, check, fit
from .maps import KINDS, Asinh, Log, Logit, NormalScores

__all__ = ["KINDS", "Asinh", "Coordinates", "Log", "Logit", "NormalScores", "check", "fit"]
