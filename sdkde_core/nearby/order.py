"""An order of points in which neighbours stand together: that of the leaves of a k-d tree."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

__all__ = ["order"]


def order(points: Any, size: int) -> Any:
    """Return the indices of points in the order of a k-d tree's leaves, which have ``size`` points each.

    The widest dimension of a node is split in the middle, level by level, so that the nodes of a level are sorted side
    by side, as one array. For that the points are first split into parts of ``size`` times powers of two, the largest
    first, and what is left is the last leaf. The same points give the same order.

    Parameters
    ----------
    points : (n, d) array
        Finite.
    size : int
        Points of a leaf.

    Returns
    -------
    (n,) array of int
    """
    xp = array_namespace(points)
    index = xp.arange(points.shape[0], device=device(points))
    parts, rest = [], index
    while rest.shape[0] > size:
        full = rest.shape[0] // size
        most = size << (full.bit_length() - 1)
        if most < rest.shape[0]:
            here = _split(xp, points, rest[None, :], most)[0, :]
            first, rest = here[:most], here[most:]
        else:
            first, rest = rest, rest[:0]
        parts.append(_leaves(xp, points, first, size))
    return xp.concat([*parts, rest])


def _leaves(xp: Any, points: Any, index: Any, size: int) -> Any:
    """The order of a part whose leaves are a power of two in number."""
    nodes = index[None, :]
    while nodes.shape[1] > size:
        half = nodes.shape[1] // 2
        nodes = xp.reshape(_split(xp, points, nodes, half), (-1, half))
    return xp.reshape(nodes, (-1,))


def _split(xp: Any, points: Any, nodes: Any, at: int) -> Any:
    """Return nodes, (k, length) indices, with the ``at`` least along each one's widest dimension first."""
    k, length = nodes.shape
    inside = xp.reshape(points[xp.reshape(nodes, (-1,)), :], (k, length, -1))
    widest = xp.argmax(xp.max(inside, axis=1) - xp.min(inside, axis=1), axis=1)  # (k,)
    along = xp.take_along_axis(inside, xp.broadcast_to(widest[:, None, None], (k, length, 1)), axis=2)[:, :, 0]
    partition = getattr(xp, "argpartition", None)  # NumPy's, in linear time
    places = xp.argsort(along, axis=1, stable=True) if partition is None else partition(along, at, axis=1)
    return xp.take_along_axis(nodes, places, axis=1)
