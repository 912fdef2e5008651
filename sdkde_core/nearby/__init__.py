"""Only the pairs that matter: which tiles of columns can matter to which rows, with a bound for every row.

Most φ_ij are far below what a result may be off by. Where neighbours stand together, in rows and in columns, whole
tiles of pairs are; a backend then sums over the rest. Points are put into the order of a k-d tree's leaves
(:func:`order`). Columns get boxes, means and sums of weights by tile, and by sixteen tiles (:func:`index`). For some
neighbouring rows at a time :func:`lists` returns the tiles of columns that each tile of rows needs, so that no more
memory is taken than these lists need: some hundred rows on a CPU, many such groups at once on a device.
Rows on a CPU that are far from all columns share no lists: each goes down a tree of tiles by itself (``sums``).
:func:`rough_share` says from a few points how many pairs that leaves, :func:`typical_share` what typical data leave.

Everything is for arrays of any library with the array API, on any device, and the same points give the same lists. Rows
and columns have to be finite. Below, W is the sum of all weights.

What a row's sum is at least
    exp is convex. So by Jensen's inequality the columns of a tile, with weights W_J in all, add at least
    W_J exp(−½ q) to a row's sum S, q being the weighted mean of the squares of their distances from the row:
    ‖u − c‖² + V, with the tile's mean c and the mean square V of the distances from there. Summed over the nearest
    tiles that is a bound F(u) on S, and F(u) + ½‖u‖², the log of a sum of exponentials of linear functions, is convex
    in u. So for rows u beside a point a, as good as their mean, F(u) ≥ F(a) + ∇F(a)·(u − a) − ½‖u − a‖², where ∇F(a)
    is the mean of c − a with the terms' shares: some rows share one evaluation. The least of all rows of a tile is its
    **floor** exp(ℓ₀) ≤ S. It holds for rows far in the tails and between clusters.

What a tile adds at most
    With m the distance of two boxes, a tile J adds at most W_J exp(−½ m²) to S. Leaving out columns D changes

    * LOG_SUM by S_D / S: the factor f is 1.
    * MEAN by ‖Σ_D w φ (shift − (u_j − u_i))‖ / S. The weights p_j = w_j φ_j / S have a relative entropy to w_j / W
      that is not negative, which says Σ p_j ½ r_j² ≤ log W − ℓ. So ‖shift‖ ≤ r₀ = √(2 (log W − ℓ₀)), the row's
      **reach**, and the factor is f = r + r₀. f exp(−½ r²) decreases from r = 1 on, so that max(m, 1) serves for r.
      Where the columns are a part of all columns, whose weights sum to 1, the bound has to hold for the shift over
      all. That one is far longer where the others weigh far more. Its ℓ is no less than ℓ₀; so W is 1 here.
    * LAPLACE by M_D, relative to M ≥ (1 + d/2) S: the factor is f = 1 + ½ r² / (1 + d/2), and f exp(−½ r²)
      decreases.

    So a row of tiles may leave out tiles as long as Σ W_J f(m_J) exp(−½ m_J²) ≤ η τ exp(ℓ₀), with the level's tolerance
    τ (its absolute part) and a fixed share η. Tiles of tiles are left out where their part is at most the share of η τ
    that their weight, or their number, comes to. Of the others a threshold is found by bisection: all tiles below
    together are within η τ. Both shares come to :func:`left_out`.

What a backend may leave out besides
    It sees the terms t = w φ themselves. Of a list of k tiles, the terms up to a cut t₀ with
    k · size · 2 f(t₀) t₀ ≤ η τ exp(ℓ₀) come to no more than that, since f(t) t decreases towards smaller terms. f(t₀)
    is taken at r² = 2 (log W − log t₀), which no column with such a term exceeds, and the factor 2 covers that the cut
    is lowered by f itself.

Rounding: squares of distances are right to 1e-12 of themselves, by which they are lowered or raised; a mean's own
rounding is carried along (:attr:`Tiles.slip`). Log sums far below −10¹² are not resolved by that: then more is kept.
"""

from __future__ import annotations

from .forecast import rough_share, typical_share
from .lists import Lists, left_out, lists
from .sums import Neighbours
from .tiles import Index, by_tile, index, order
