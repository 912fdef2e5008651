"""How many rows a batch of long work has, and who is told how many are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..arrays import Argument
from ..choice.hardware import cpu_threads
from ..protocol import Problem

Advance = Callable[[int], None]  # called with every number of rows that are done

ROWS = 1 << 16  # of a batch at most


def batch_rows(m: int, problem: Problem) -> int:
    """Return the rows of a batch, of m over the samples: up to 32 MiB, on a CPU about a second's work or a 256th.

    At least 256, as fewer would occupy no backend.
    """
    n, d, rows = problem.n, problem.d, min(ROWS, (1 << 22) // problem.d)
    if problem.device == "cpu":
        rows = min(rows, max(cpu_threads() * (1 << 32) // (n * (d + 16)), m // 256))
    return max(rows, 256)


@contextmanager
def watched(progress: Any, *given: Argument | int | None) -> Iterator[Advance | None]:
    """Yield the function to call with every number of rows done; None where nobody watches, or there are no rows.

    ``progress`` is the user's: a bool, or a function of the rows done and of all rows. These are those of what is
    ``given``: samples that a pass moves, and a query; or a number. What has no axis is refused where it is read.
    """
    sizes = [x.shape[:1] if isinstance(x, Argument) else (x,) for x in given if x is not None]
    rows = sum(size[0] for size in sizes if size)
    if isinstance(progress, bool | np.bool_):
        if not progress:
            yield None
            return
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError(
                f"progress=True needs tqdm: pip install 'sdkde-core[progress]' ({error}); or pass a function of the "
                "rows done and of all rows"
            ) from error
        with tqdm(total=rows, desc="sdkde", unit=" rows", unit_scale=True, disable=not rows) as bar:
            yield (lambda k: bar.update(min(k, rows - bar.n))) if rows else None
    elif callable(progress):
        done = 0

        def advance(k: int) -> None:
            nonlocal done
            done = min(done + k, rows)  # what is done anew with another backend does not count twice
            progress(done, rows)

        yield advance if rows else None
    else:
        raise TypeError(f"progress is {progress!r}; pass True for a bar, or a function of the rows done and all rows")
