"""What the paper published, to stand beside ours: on an RTX A6000, scikit-learn on two EPYCs of 64 cores."""

from __future__ import annotations

__all__ = ["BATCHES", "DIMENSIONS", "MILLION", "ORACLE_1D", "ORACLE_16D", "PAPER_LAUNCH", "RUNTIME"]

#: SD-KDE of 32768 × 4096 in 16 dimensions, milliseconds; KeOps from two tables of theirs, scikit-learn's is KDE.
RUNTIME = {
    "scikit-learn": 8017.0,
    "PyTorch": 113.0,
    "torch.compile": 34.0,
    "KeOps": 16.9,
    "KeOps, kde": 3.33,
    "flash-sd-kde": 2.11,
}

#: Flash-SD-KDE of 32768 × 4096 by d, milliseconds.
DIMENSIONS = {16: 2.4, 32: 3.5, 64: 6.8, 128: 19.8}

#: Flash-SD-KDE of 32768 points by the number of queries, milliseconds.
BATCHES = {4: 1.91, 16384: 2.75}

#: Flash-SD-KDE of 1M × 131k in 16 dimensions, milliseconds.
MILLION = 2300.0

#: The launch parameters that they found best for the score kernel.
PAPER_LAUNCH = {"BLOCK_M": 64, "BLOCK_N": 1024, "num_warps": 2, "num_stages": 2}

#: By n: mean integrated squared error of kde, sdkde, laplace.
ORACLE_1D = {
    128: (0.034435, 0.030365, 0.018034),
    1024: (0.014812, 0.008752, 0.003811),
    4096: (0.007211, 0.002801, 0.001114),
}

#: By n: MISE × 1e6 and MIAE of kde, sdkde, laplace clamped at 1e-30. Digits are as published.
ORACLE_16D = {
    3_000: ((10.4, 10.3, 9.55), (1.41, 1.37, 1.95)),
    10_000: ((10.1, 9.8, 8.94), (1.21, 1.17, 1.29)),
    100_000: ((9.67, 8.81, 7.83), (1.18, 1.06, 1.16)),
    1_000_000: ((9.08, 7.19, 6.50), (1.10, 0.89, 0.99)),
}
