"""Only the pairs that matter: which tiles of columns can matter to which rows, with a bound for every row.

Most φ_ij are far below what a result may be off by. Where neighbours stand together, in rows and in columns, whole
tiles of pairs are; a backend then sums over the rest. Points are put into the order of a k-d tree's leaves
(:func:`order`). Columns get boxes, means and sums of weights by tile, and by sixteen tiles (:func:`index`). For some
neighbouring rows at a time :func:`lists` returns the tiles of columns that each tile of rows needs, so that no more
memory is taken than these lists need: some hundred rows on a CPU, many such groups at once on a device.
Rows on a CPU that are far from all columns share no lists: each goes down a tree of tiles by itself (``sums``).
:func:`rough_share` says from a few points how many pairs that leaves, :func:`typical_share` what typical data leave.

Everything is for arrays of any library with the array API, on any device, and the same points give the same lists. Rows
and columns have to be finite. W is the sum of all weights. Squares of distances are right to 1e-12 of themselves, by
which they are lowered or raised; a mean's own rounding is carried along (:attr:`Tiles.slip`). Log sums far below −10¹²
are not resolved by that: then more is kept. The bounds are derived in docs/mathematics.md.
"""

from __future__ import annotations

from .forecast import rough_share, typical_share
from .lists import Lists, left_out, lists
from .sums import Neighbours
from .tiles import Index, by_tile, index, order
