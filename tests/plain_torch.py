"""A backend of plain PyTorch, for tests: all pairs at once, derivatives by autograd."""

import math

import torch

from sdkde_core.protocol import BackendInfo, Partial, Reduction, Support


class PlainTorch:
    """Direct differences in float64, right at any extent."""

    def probe(self, device):
        return Support(device == "cpu" or torch.cuda.is_available(), "PyTorch runs there")

    def prepare(self, problem, columns):
        return columns

    def reduce(self, problem, queries, state, own_offset=0):
        rows = state.points if queries is None else queries
        away = state.points[None, :, :] - rows[:, None, :]  # (m, n, d)
        exponent = -0.5 * (away * away).sum(-1)  # (m, n)
        log_weights, weights = state.log_weights, torch.exp(state.log_weights)
        if state.weights is not None:  # their values are known; what is added is 0, with a derivative
            weights = weights + (state.weights - state.weights.detach())
        top = (exponent + log_weights).detach().amax(1, keepdim=True)  # (m, 1)
        terms = torch.exp(exponent - top) * weights
        total = terms.sum(1)
        log_sum = total.log() + top[:, 0]
        if problem.reduction is Reduction.LOG_SUM:
            return Partial(log_sum)
        if problem.reduction is Reduction.MEAN:
            return Partial(log_sum, shift=(terms[:, :, None] * away).sum(1) / total[:, None])
        half = 1.0 + 0.5 * problem.d
        signed = (terms * (half + exponent)).sum(1)
        plus = (terms * (half - exponent)).sum(1)
        magnitude = signed.abs().log() + top[:, 0]
        return Partial(plus.log() + top[:, 0], sign=signed.detach().sign(), log_magnitude=magnitude)


INFO = BackendInfo(
    name="plain-torch",
    protocol=(1, 0),
    implementation="plain_torch:PlainTorch",
    devices=("cpu", "cuda"),
    precisions=("fast", "high", "float64"),
    features=frozenset({"weights", "grad"}),
    requires_modules=("torch",),
    install="not for use",
    arrays="torch",
    startup_seconds=math.inf,  # taken only where no other can
)
