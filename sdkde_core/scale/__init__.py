"""Estimates of more samples than one memory, or one machine, holds.

:func:`estimate` and :func:`debias` read samples shard by shard, and keep what is done in a checkpoint. What they are
made of is :mod:`.planner`: what is decided once and frozen, and sums of any block of rows over any shard.
"""

from .blocks import answered, asked_of
from .planner import Frozen, Shape, freeze
from .run import debias, estimate

__all__ = ["Frozen", "Shape", "answered", "asked_of", "debias", "estimate", "freeze"]
