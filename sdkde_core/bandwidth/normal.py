"""The normal reference: the best bandwidth for normal samples, by estimator."""

from __future__ import annotations

__all__ = ["normal_reference", "rate"]


def rate(method: str, d: int) -> float:
    """The power of n at which a method's best bandwidth shrinks: 1/(d+4) for kde, 1/(d+8) for debiased estimates."""
    return 1 / (d + 4) if method == "kde" else 1 / (d + 8)


def normal_reference(method: str, d: int, n: float) -> float:
    """The best bandwidth for n normal samples of standard deviation 1 in each of d independent columns.

    To leading order in the bandwidth; docs/bandwidths.md derives the constants.
    """
    if method == "kde":
        power = 4 / (d + 2)
    elif method == "sdkde":
        power = 1.28 * (1 + d / 3 * (2 / 3) ** (d / 2) + d * (d + 2) / 64 * 2 ** (-d / 2)) / (d + 2)
    else:
        power = 128 * (1 + d / 2 + d * (d + 2) / 16) / ((d + 2) * (d + 4) * (d + 6))
    return float((power / n) ** rate(method, d))
