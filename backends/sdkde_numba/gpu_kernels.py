"""Device code of the CUDA target: one reduction of rows over columns, made for every shape that is asked for.

A row belongs to ``group`` neighbouring threads, each with ``depth`` of its coordinates in registers; a thread has
``rows`` of them, so that a column's coordinate, read from shared memory, serves as many. In log2 units:

    v = √(½ log2 e) u     e_ij = t_j − Σ_k (v_jk − v_ik)²        direct differences; float64: v = u, Σ times ½ log2 e
    v = √(log2 e) u       e_ij = t_j + Σ_k v_ik v_jk             expanded squares, −½‖v_i‖² added at the end

t_j is log2 w_j where weights vary, and for expanded squares −½‖v_j‖² with it. Summed are 2^(e_ij − top_i), top_i near
the row's largest exponent; for MEAN also its products with v_j − v_i; for LAPLACE its products with e_ij without t_j,
or, of expanded squares, with e_ij − top_i: all columns of a heap of duplicates are rounded alike, and far from zero.
Sums are added to the results, which are float64, every 64 or 512 columns by precision, and every 4096 in float64.

No module here may have a name that begins with ``cuda``: numba-cuda's import hook takes any module for its own whose
full name contains ``numba.cuda``.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda, float32, float64, int64, uint64, void

#: Whether kernels run in Numba's simulator, on the CPU.
SIMULATED = bool(config.ENABLE_CUDASIM)

#: The exponent of a column that is not there, for float32 and float64: finite, so that differences are.
ABSENT = (-1e34, -1e296)

#: Unsigned indices: a signed one may count from an array's end, and the test for that takes longer than the load.
index = uint64


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    depth: int  # a row's coordinates in one thread
    group: int  # threads of a row, a power of two, at most 32
    rows: int  # of a thread
    threads: int  # of a block
    columns: int  # in shared memory at a time
    registers: int  # of a thread, at most; 0: the compiler's choice
    reduction: str
    arithmetic: str  # see :func:`sdkde_numba.gpu_bounds.arithmetic`
    terms: bool  # there are t_j
    anchored: bool  # every row is a column too, so that its largest exponent is 0

    @property
    def width(self) -> int:
        """Numbers of a packed point."""
        return self.depth * self.group * (2 if self.arithmetic == "doubled" else 1)

    @property
    def results(self) -> int:
        """Numbers of a row's result: the running maximum, the sum, the moment or the sums of differences."""
        return 2 + {"log_sum": 0, "laplace": 1, "mean": self.depth * self.group}[self.reduction]


if SIMULATED:
    exp2, product = np.exp2, operator.mul

    def exchanged(mask, x, step):
        """The value of the thread whose number differs in bit ``step``: the simulator has no exchange of registers."""
        shared = cuda.shared.array(1024, float64)
        t = cuda.threadIdx.x
        shared[t] = x
        cuda.syncthreads()
        other = x.dtype.type(shared[t ^ step])
        cuda.syncthreads()
        return other

else:
    from llvmlite import ir
    from numba.cuda import libdevice
    from numba.cuda.extending import intrinsic

    exchanged = cuda.shfl_xor_sync

    # Never fused with the subtraction of the maximum: far from every column its rounding error is thousands.
    product = libdevice.dmul_rn

    @intrinsic
    def exp2(typingctx, x):
        """2^x. In float32 as the hardware has it: off by two units in the last place, 0 below 2^−126."""

        def generate(context, builder, signature, arguments):
            real = arguments[0].type
            function = ir.FunctionType(real, [real])
            if isinstance(real, ir.FloatType):
                return builder.call(ir.InlineAsm(function, "ex2.approx.ftz.f32 $0, $1;", "=f,f"), arguments)
            module = builder.module
            known = module.globals.get("__nv_exp2") or ir.Function(module, function, "__nv_exp2")
            return builder.call(known, arguments)

        return x(x), generate


def signature(shape: Shape) -> Any:
    numbers = (float64 if shape.arithmetic == "float64" else float32)[::1]
    return void(numbers, numbers, numbers, float64[::1], int64, int64, int64, int64)


def reduction(shape: Shape) -> Any:
    """Return the kernel of a shape, not yet compiled.

    Its arguments are rows (m, width) and columns (padded, width) as packed, t_j (padded,) if columns have them,
    ``results`` (parts, results, m), zeros, m, padded, the columns of a part, and how many columns are summed in
    float32. Kernels of one name share a file in Numba's cache, where the limit on registers makes no difference: so
    every shape has a name.
    """
    depth, group, rows, threads, tile, _, kind, arithmetic, terms, anchored = shape
    double, doubled, expanded = (arithmetic == each for each in ("float64", "doubled", "expanded"))
    width, many = shape.width, shape.results
    unrolled = 1 if kind == "mean" and depth > 2 else 4  # columns whose exponents a thread has at once
    size, low, lanes, bits = tile * width, depth * group, threads // group, group.bit_length() - 1
    lazy = 20.0  # log2: an exponent may be that far above a row's running maximum before its sums are scaled to it
    mean, laplace = kind == "mean", kind == "laplace"
    kept_low, kept_means, kept_terms = (depth if doubled else 1), (depth if mean else 1), (tile if terms else 1)
    floor = -1e290 if double else -1e30
    # Of the coordinates a thread has some neighbours, then those after its row's other threads: whole vectors.
    shift = 2 if depth % 4 == 0 else 1 if depth % 2 == 0 else 0
    vector, gap = 1 << shift, (group - 1) << shift  # besides the vector itself, from one to the next
    half_square = -0.5 * np.log2(np.e)  # log2 of what a squared distance in bandwidths makes of a pair
    real, aligned = (float64 if double else float32), (None if SIMULATED else 16)  # bytes, for whole vectors

    def kernel(packed_rows, packed_columns, packed_terms, results, m, padded, part, chunk):
        columns = cuda.shared.array(size, real, aligned)
        t_j = cuda.shared.array(kept_terms, real, aligned)
        x = cuda.local.array((rows, depth), real)
        x_low = cuda.local.array((rows, kept_low), real)
        away = cuda.local.array((rows, unrolled, kept_means), real)
        e = cuda.local.array((rows, unrolled), real)
        total_e = cuda.local.array((rows, unrolled), real)  # with t_j
        below = cuda.local.array((rows, unrolled), real)
        top = cuda.local.array(rows, real)
        stored_top = cuda.local.array(rows, real)
        total = cuda.local.array(rows, real)
        moment = cuda.local.array(rows, real)
        means = cuda.local.array((rows, kept_means), real)

        thread = cuda.threadIdx.x
        lane = thread & (group - 1)
        first_row = cuda.blockIdx.x * (lanes * rows) + (thread >> bits)
        for r in range(rows):
            i = min(first_row + r * lanes, m - 1)
            top[r] = real(0.0 if anchored else floor)
            stored_top[r] = top[r]
            total[r] = real(0.0)
            moment[r] = real(0.0)
            for k in range(depth):
                at = i * width + lane * vector + (k >> shift) * gap + k
                x[r, k] = packed_rows[index(at)]
                if doubled:
                    x_low[r, k] = packed_rows[index(at + low)]
                if mean:
                    means[r, k] = real(0.0)

        begin = cuda.blockIdx.y * part
        end = min(begin + part, padded)
        for first in range(begin, end, chunk):
            for start in range(first, min(first + chunk, end), tile):
                cuda.syncthreads()
                for at in range(thread, size, threads):
                    columns[index(at)] = packed_columns[index(start * width + at)]
                if terms:
                    for at in range(thread, tile, threads):
                        t_j[index(at)] = packed_terms[index(start + at)]
                cuda.syncthreads()
                for j in range(0, tile, unrolled):
                    highest = real(floor)
                    for u in range(unrolled):
                        by = (j + u) * width + lane * vector
                        for r in range(rows):
                            s = real(0.0)
                            for k in range(depth):
                                at = by + (k >> shift) * gap + k
                                c = columns[index(at)]
                                if expanded:
                                    s += c * x[r, k]
                                else:
                                    a = c - x[r, k]
                                    if doubled:  # near pairs' leading parts cancel exactly: then the rest counts
                                        a += columns[index(at + low)] - x_low[r, k]
                                    s += a * a
                                    if mean:
                                        away[r, u, k] = a
                            e[r, u] = s
                    # Rows side by side: an exchange waits for the one before it of the same row alone.
                    for bit in range(bits):  # the same bits in all threads of a row
                        for u in range(unrolled):
                            for r in range(rows):
                                e[r, u] += exchanged(0xFFFFFFFF, e[r, u], 1 << bit)
                    for u in range(unrolled):
                        for r in range(rows):
                            s = e[r, u]
                            if double:
                                s = s * real(half_square) if terms else product(s, real(half_square))
                            elif not expanded:
                                s = -s
                            e[r, u] = s
                            if terms:
                                s += t_j[index(j + u)]
                            total_e[r, u] = s
                            below[r, u] = s - top[r]
                            highest = max(highest, below[r, u])
                    if not anchored and highest > real(lazy):
                        for r in range(rows):
                            new = top[r]
                            for u in range(unrolled):
                                if below[r, u] > real(lazy):
                                    new = max(new, total_e[r, u])
                            decay = exp2(top[r] - new)
                            if laplace and expanded:
                                moment[r] -= (new - top[r]) * total[r]
                            top[r] = new
                            total[r] *= decay
                            moment[r] *= decay
                            for u in range(unrolled):
                                below[r, u] = total_e[r, u] - new
                            if mean:
                                for k in range(depth):
                                    means[r, k] *= decay
                    for u in range(unrolled):
                        for r in range(rows):
                            p = exp2(below[r, u])
                            total[r] += p
                            if laplace:
                                moment[r] += p * (below[r, u] if expanded else e[r, u])
                            if mean:
                                for k in range(depth):
                                    means[r, k] += p * away[r, u, k]
            for r in range(rows):
                i = first_row + r * lanes
                at = cuda.blockIdx.y * (many * m) + i
                share = 1.0  # of what is there
                if not anchored:
                    share = exp2(float64(stored_top[r]) - float64(top[r]))
                if i < m:
                    if lane == 0:
                        results[index(at)] = top[r]
                        if laplace:
                            kept = results[index(at + 2 * m)]
                            if expanded:
                                kept -= (float64(top[r]) - float64(stored_top[r])) * results[index(at + m)]
                            results[index(at + 2 * m)] = kept * share + moment[r]
                        results[index(at + m)] = results[index(at + m)] * share + total[r]
                    if mean:
                        for k in range(depth):
                            to = index(at + (2 + lane * vector + (k >> shift) * gap + k) * m)
                            results[to] = results[to] * share + means[r, k]
                stored_top[r] = top[r]
                total[r] = real(0.0)
                moment[r] = real(0.0)
                if mean:
                    for k in range(depth):
                        means[r, k] = real(0.0)

    kernel.__qualname__ = "kernel_" + "_".join(str(x if isinstance(x, str) else int(x)) for x in shape)
    return kernel
