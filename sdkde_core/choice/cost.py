"""From what a formulation does (Work) to the time that it takes, and how well a measured time uses the hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..engine.exact import BLOCK
from ..protocol import BackendInfo, Problem, Reduction, Work
from .cards import Processor
from .hardware import speedup

__all__ = [
    "PaperModel",
    "PaperPass",
    "beyond_cache",
    "exact_work",
    "intensity",
    "paper_model",
    "plain_work",
    "predict",
    "roofs",
    "tiled",
    "typical_extent",
    "utilisation",
    "work_seconds",
]


def plain_work(problem: Problem) -> Work:
    """Return the Work of the plain formulation: one matrix product for the exponents, one more for MEAN's shift.

    Per pair 2(d + 2) operations for the exponent with both norms in the product, 2(d + 1) for the shift, and
    five more for the running maximum, the subtraction, the clamp and the sum; one exponential. Memory: every
    point is read once and every result written once, float64.
    """
    dtype = "float32" if problem.precision == "fast" else "float64"
    per_pair = 2.0 * (problem.d + 2)
    if problem.reduction is Reduction.MEAN:
        per_pair += 2.0 * (problem.d + 1)
    written = {Reduction.LOG_SUM: 1, Reduction.MEAN: 1 + problem.d, Reduction.LAPLACE: 3}[problem.reduction]
    return Work(
        matrix_flops={dtype: per_pair * problem.pairs},
        scalar_flops=5.0 * problem.pairs,
        exps=float(problem.pairs),
        bytes=8.0 * ((problem.m + problem.n) * problem.d + problem.m * written),
    )


def beyond_cache(d: int) -> float:
    """What an operation on differences in memory costs in many dimensions, in those in few: tiles leave the cache."""
    return min(4.0, max(1.0, d / 80.0))


def exact_work(problem: Problem) -> Work:
    """Return the Work of the core's exact path: differences in memory, one thread.

    On a GPU the operations of a block of differences are launches of their own, and go through its memory. Of SD-KDE of
    a million samples in six dimensions, of which 0.16 % lay beyond the Hopper backend's limit, an H200 spent 2.8 s on
    that: 0.28 ms a block.
    """
    pairs = float(problem.pairs)
    mean = problem.reduction is Reduction.MEAN
    if not problem.device.startswith("cpu"):
        numbers = problem.d * pairs
        launches = (30 if mean else 20) * math.ceil(numbers / BLOCK)
        return Work(exps=2.0 * pairs, bytes=8.0 * (46.0 if mean else 30.0) * numbers, launches=launches)
    passes = (12.0 if mean else 8.0) * beyond_cache(problem.d)
    return Work(scalar_flops=2.0 * passes * problem.d * pairs, exps=2.0 * pairs, parallel=False)


def roofs(work: Work, on: Processor) -> dict[str, float]:
    """Return the time that each unit needs for ``work`` at its peak, in seconds."""
    share = 1.0 if work.parallel else speedup(on.threads)  # one thread has that fraction of the rates
    times = {f"matrix {dtype}": share * flops / on.matrix_flops[dtype] for dtype, flops in work.matrix_flops.items()}
    times["scalar"] = share * work.scalar_flops / on.scalar_flops
    times["exp"] = share * work.exps / on.exps
    times["memory"] = work.bytes / on.bandwidth
    times["transfer"] = work.transfer_bytes / on.transfer
    times["launch"] = work.launches * on.launch_seconds
    return times


def work_seconds(work: Work, on: Processor) -> float:
    """Return the predicted time of ``work``, in seconds.

    Where the units work side by side: the largest of their roofs (products of all dtypes share one unit), after the
    transfers and the launches, which nothing hides. Otherwise their sum.
    """
    times = roofs(work, on)
    before = times.pop("transfer") + times.pop("launch")
    matrix = sum(times.pop(key) for key in list(times) if key.startswith("matrix"))
    units = [matrix, *times.values()]
    return before + (max(units) if on.overlaps else sum(units))


def utilisation(work: Work, on: Processor, measured_seconds: float) -> dict[str, float]:
    """Return the share of each roof that a measured time reaches: 1 is the peak of that unit.

    Raises
    ------
    ValueError
        ``measured_seconds`` is not positive.
    """
    if not measured_seconds > 0:
        raise ValueError(f"measured_seconds is {measured_seconds}; pass a positive time")
    return {unit: time / measured_seconds for unit, time in roofs(work, on).items()}


def predict(info: BackendInfo, problem: Problem, on: Processor | None) -> float | None:
    """Return the predicted time of a pass in seconds, without start-up.

    None where the processor is not known, or not its rate for a dtype of the backend's products.
    """
    if on is None:
        return None
    work = info.work(problem, None) if info.work else plain_work(problem)
    return work_seconds(work, on) if work.matrix_flops.keys() <= on.matrix_flops.keys() else None


def intensity(work: Work) -> float:
    """Return the arithmetic intensity of ``work``: matrix and scalar operations per byte of main memory."""
    return (sum(work.matrix_flops.values()) + work.scalar_flops) / work.bytes


def tiled(problem: Problem, block_m: int, block_n: int, itemsize: int = 4) -> Work:
    """Return the plain Work with the memory traffic of a tiled kernel that keeps nothing between tiles.

    Every tile loads its ``block_m`` rows and ``block_n`` columns, and writes its rows' partial sums: the upper bound on
    traffic, as caches keep some of it. Its :func:`intensity` is that of a tile.

    Parameters
    ----------
    problem : Problem
    block_m, block_n : int
        Rows and columns of a tile.
    itemsize : int
        Bytes of a number.
    """
    written = {Reduction.LOG_SUM: 1, Reduction.MEAN: 1 + problem.d, Reduction.LAPLACE: 2}[problem.reduction]
    tile = itemsize * (block_m * problem.d + block_n * problem.d + block_m * written)
    return replace(plain_work(problem), bytes=float(tile) * problem.pairs / (block_m * block_n))


def typical_extent(n: int, d: int) -> float:
    """Extent in bandwidths to expect of n standard normal points under Silverman's rule: for planning from shapes."""
    radius = math.sqrt(d) + math.sqrt(2 * math.log(max(n, 2)))
    return radius / (0.9 * n ** (-1 / (d + 4)))


# --- the paper's model of its own kernels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperPass:
    """A pass in the paper's units: ``flops`` (one exp counts as 8), ``bytes`` of main memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class PaperModel:
    """The paper's cost of SD-KDE with k training points and k/8 queries.

    Parameters
    ----------
    score, evaluation : PaperPass
        The n² pass, and the density at the queries.
    tile_bytes : float
        Main memory traffic of one tile of the score pass, in bytes.
    """

    score: PaperPass
    evaluation: PaperPass
    tile_bytes: float

    @property
    def total(self) -> PaperPass:
        """Both passes."""
        return PaperPass(self.score.flops + self.evaluation.flops, self.score.bytes + self.evaluation.bytes)

    @property
    def published_intensity(self) -> float:
        """The paper's 72 FLOP/byte at d = 16: FLOPs of both passes over the bytes of the score pass alone."""
        return self.total.flops / self.score.bytes


def paper_model(k: int, d: int = 16, block_m: int = 64, block_n: int = 1024) -> PaperModel:
    """Return the paper's FLOPs and bytes for its own kernels, by pass.

    Parameters
    ----------
    k : int
        Training points; k/8 queries.
    d : int
        Dimensions, at least 2 (the paper's 1-D kernels have another model).
    block_m, block_n : int
        The tile.

    Notes
    -----
    Per pair, score 4d + 12 and evaluation 2d + 12 FLOPs, an exp counted as 8 (128 fp32 lanes to 16 special function
    units): 81.5 k² for both at d = 16. A tile moves 4 (2 · block_m · d + block_n · d + block_m) bytes, 73 984 at
    d = 16 with 64 × 1024, so 1.129 k² bytes for the score pass.

    Two things in the paper do not agree with each other. Its 72 FLOP/byte divide the FLOPs of both passes by the bytes
    of the score pass alone (:attr:`PaperModel.published_intensity`): pass by pass this model gives 67 for the score.
    And its general formula, I(k) ~ C(d) · k with C(d) = (17/4 d + 27/2) / (9/2 d), counts each input once however often
    a tile loads it, which contradicts the constant 72: the tile model is the one that agrees with the profiler (95
    measured). C(16) is 1.13 by coincidence, the same digits as the bytes per k², in other units.

    The 155 TFLOP/s that the paper takes as the A6000's Tensor Core peak are the fp16 figure; its kernels use TF32,
    whose dense peak is half of it (:data:`sdkde_core.choice.cards.GPUS`).
    """
    if d < 2:
        raise ValueError(f"d is {d}; the paper's 1-D kernels have another model, pass d ≥ 2")
    queries = k / 8
    tile = 4.0 * (2 * block_m * d + block_n * d + block_m)
    # The evaluation writes a density per row and no weighted sums.
    evaluation_tile = 4.0 * (block_m * d + block_n * d + block_m)
    tiles_per_pair = 1.0 / (block_m * block_n)
    return PaperModel(
        score=PaperPass((4 * d + 12) * float(k) * k, tile * tiles_per_pair * k * k),
        evaluation=PaperPass((2 * d + 12) * float(k) * queries, evaluation_tile * tiles_per_pair * k * queries),
        tile_bytes=tile,
    )
