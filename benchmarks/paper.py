"""The paper's model of its own kernels."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PaperModel", "PaperPass", "paper_model"]


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
