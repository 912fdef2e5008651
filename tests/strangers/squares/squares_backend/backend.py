"""Expanded squares in float64: exponents from one matrix product, blocks of rows that fit in memory."""

import numpy as np

from sdkde_core.protocol import Partial, Reduction, Support

CELLS = 1 << 20  # numbers in a block of rows by all columns: 8 MiB


class ExpandedSquares:
    def probe(self, device):
        return Support(device == "cpu", "NumPy runs on the CPU")

    def prepare(self, problem, columns):
        points = columns.points  # (n, d)
        return points, columns.log_weights - 0.5 * np.vecdot(points, points), columns.log_weights

    def reduce(self, problem, queries, state, own_offset=0):
        rows = state[0] if queries is None else queries  # None: the points themselves
        m, d = rows.shape
        mean, laplace = problem.reduction is Reduction.MEAN, problem.reduction is Reduction.LAPLACE
        answer = Partial(
            log_sum=np.empty(m),
            shift=np.empty((m, d)) if mean else None,
            sign=np.empty(m) if laplace else None,
            log_magnitude=np.empty(m) if laplace else None,
        )
        height = max(1, CELLS // len(state[0]))
        for start in range(0, m, height):  # not at all where m = 0
            self._block(problem, rows, state, slice(start, start + height), answer)
        return answer

    @np.errstate(divide="ignore")  # log 0, where L is 0
    def _block(self, problem, rows, state, here, answer):
        points, column_terms, log_weights = state
        u = rows[here]  # (b, d)
        terms = u @ points.T  # (b, n), and in place from here to log w_j − ½ r²_ij
        terms += column_terms
        terms -= 0.5 * np.vecdot(u, u)[:, None]
        top = terms.max(axis=1)
        phi = np.exp(terms - top[:, None])  # (b, n), relative to exp(top)
        total = phi.sum(axis=1)
        if problem.reduction is Reduction.LAPLACE:
            half_squares = np.where(phi > 0, log_weights - terms, 0.0)  # ½ r²_ij
            constant = (1 + 0.5 * problem.d) * total
            weighted = np.vecdot(phi, half_squares)
            signed = constant - weighted
            answer.log_sum[here] = np.log(constant + weighted) + top
            answer.sign[here] = np.sign(signed)
            answer.log_magnitude[here] = np.log(abs(signed)) + top
            return
        answer.log_sum[here] = np.log(total) + top
        if problem.reduction is Reduction.MEAN:
            answer.shift[here] = (phi @ points - total[:, None] * u) / total[:, None]
