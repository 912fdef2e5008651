"""What XLA compiles: a tile of b rows and c columns, added to the rows' sums. Points stand upright: (d, b), (d, c)."""

import functools

import jax
import jax.numpy as jnp

from sdkde_core.protocol import Reduction


def by_products(u, x):
    """Return −½ ‖u_i − x_j‖², (b, c), as u_i·x_j − ½ ‖u_i‖² − ½ ‖x_j‖²."""
    inner = jnp.einsum("ki,kj->ij", u, x, precision="highest")  # else GPUs and TPUs round to fewer digits
    return inner - 0.5 * (u * u).sum(0)[:, None] - 0.5 * (x * x).sum(0)[None, :]


def by_differences(u, x):
    """Return the same, right to a few units in the last place, however far the points are.

    The loop leaves its sum in memory. Fused into what uses it, the sum would be computed twice: for the maximum, and
    for the exponential, where it must be the very same number.
    """

    def add(total, coordinates):
        ours, theirs = coordinates
        away = theirs[None, :] - ours[:, None]
        return total + away * away, None

    total, _ = jax.lax.scan(add, jnp.zeros((u.shape[1], x.shape[1]), u.dtype), (u, x))
    return -0.5 * total


def way_by_products(phi, total, u, x):
    """Return Σ_j φ_ij (x_j − u_i), (d, b); total is Σ_j φ_ij."""
    return jnp.einsum("ij,kj->ki", phi, x, precision="highest") - total[None, :] * u


def way_by_differences(phi, total, u, x):
    """Return the same."""
    return jax.lax.map(lambda pair: (phi * (pair[1][None, :] - pair[0][:, None])).sum(1), (u, x))


FORMULAS = {"products": (by_products, way_by_products), "differences": (by_differences, way_by_differences)}


@functools.partial(jax.jit, static_argnames=("reduction", "formula"))
def add_tile(sums, u, x, log_weights, *, reduction, formula):
    """Return the sums with a tile added.

    Parameters
    ----------
    sums : (top, total, more)
        top, (b,): the largest term so far; total, (b,): Σ w φ / exp(top); more: for MEAN Σ w φ (x − u) / exp(top),
        (d, b), for LAPLACE Σ w φ (−½ r²) / exp(top), (b,), otherwise None.
    u, x : (d, b) and (d, c) arrays
    log_weights : (c,) array
        −inf for columns that are none.
    """
    exponents, way = FORMULAS[formula]
    top, total, more = sums
    exponent = exponents(u, x)
    terms = exponent + log_weights[None, :]
    largest = jnp.maximum(top, terms.max(1))
    phi = jnp.exp(terms - largest[:, None])
    kept = jnp.exp(top - largest).astype(jnp.float64)
    added = phi.sum(1)
    if reduction is Reduction.MEAN:
        more = kept[None, :] * more + way(phi, added, u, x)
    elif reduction is Reduction.LAPLACE:
        more = kept * more + (phi * exponent).sum(1).astype(jnp.float64)
    return largest, kept * total + added.astype(jnp.float64), more
