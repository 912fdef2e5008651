"""Estimates among the processes of a ``torch.distributed`` group, as torchrun, Slurm or MPI starts them.

Import it by ``import sdkde_core.distributed``; it needs PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from . import api
from .arrays import Argument, public, to_host
from .estimator.prepared import fit
from .estimator.request import Goal, Options, Request, takes_options
from .messages import optional
from .spreading.ranks import PeerFailed, Ranks

torch = optional("torch", "sdkde_core.distributed needs PyTorch", "torch")

__all__ = ["estimate"]


@public
@takes_options
def estimate(
    local_train: Any, local_query: Any = None, *, group: Any = None, log: bool = False, **options: Unpack[Options]
) -> Any:
    """Estimate a density from samples that are spread over the processes of a group, at each one's own queries.

    The result is that of :func:`sdkde_core.estimate` for the samples of all ranks, joined by rank, within the bounds of
    the precision. Samples travel to all ranks, each of which keeps all of them: little beside the work on n² pairs. The
    pass that moves the samples is shared out evenly, whoever brought them; the last pass is each rank's own queries.
    All ranks must call, with the same options.

    Parameters
    ----------
    local_train : (n_rank, d) or (n_rank,) array or tensor
        This rank's samples; any number, none included.
    local_query : (m_rank, d) or (m_rank,) array or tensor, optional
        This rank's queries; any number, none included. Default: its samples.
    group : torch.distributed.ProcessGroup, optional
        Default: all processes. With NCCL each must have set its CUDA device.
    log : bool
        Return log p̂.

    Other parameters as for :func:`sdkde_core.estimate`; ``weights`` are this rank's, (n_rank,), and sum to 1 over all.

    Returns
    -------
    (m_rank,) array
        Of the kind and on the device of ``local_query``, else of ``local_train``.

    Raises
    ------
    RuntimeError
        There is no process group; or another rank failed: the message says which, and why.
    TypeError, ValueError
        As :func:`sdkde_core.estimate`; or ranks differ in shape, dtype or options: the message says which. Tensors that
        require grad; several devices; a process that is not in the group.
    """
    if not torch.distributed.is_initialized():
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
    ranks = Ranks(group)
    try:
        result = _estimate(ranks, local_train, local_query, log, options)
        ranks.agreed({"the end": ""})
    except Exception as error:
        if not isinstance(error, PeerFailed):
            ranks.fail(error)
        raise
    return result


def _plain(given: Argument) -> Any:
    if given.origin.on_host:
        return np.asarray(given.array, given.dtype)
    if not isinstance(given.array, torch.Tensor):
        raise TypeError(f"{given.name} is on a device and no tensor of PyTorch's, which are what travels; pass one")
    return given.array.to(getattr(torch, given.dtype))


def _estimate(ranks: Ranks, local_train: Any, local_query: Any, log: bool, options: Options) -> Any:
    request = Request.of(Goal.DENSITY, options, "local_query", "group", "log")
    if request.apart:
        raise ValueError("method='stacked', coordinates= and support= are for one process; leave them out")
    if isinstance(request.device, tuple):
        raise ValueError(f"device is {', '.join(request.device)}; pass one device to each rank")
    train = Argument.of("local_train", local_train)
    query = train if local_query is None else Argument.of("local_query", local_query)
    asked = {
        "samples of shape": ("n", *train.shape[1:]),
        "queries of shape": ("m", *query.shape[1:]),
        "dtypes": (train.dtype, query.dtype),
        "weights": "given" if request.weights is not None else "not given",
    }
    for name, value in request.options("weights", "device").items():
        asked[f"{name} ="] = repr(to_host(value).tolist()) if hasattr(value, "shape") else repr(value)
    ranks.agreed(asked)
    weights = None if request.weights is None else Argument.of("weights", request.weights)
    if weights is not None and weights.shape != train.shape[:1]:
        raise ValueError(f"weights has shape {weights.shape}, but local_train has {train.shape[0]} points on this rank")
    if ranks.size == 1:  # whose call takes the few launches of one without a group
        return api.estimate(local_train, local_query, log=log, **options)
    whole = ranks.joined(_plain(train))
    if weights is not None:  # of one dtype on all ranks, whatever it is on each
        weights = ranks.joined(_plain(weights._replace(dtype="float64")))
    prepared = fit(replace(request, ranks=ranks, weights=weights), whole)
    return prepared.estimate(local_train if local_query is None else local_query, log=log)
