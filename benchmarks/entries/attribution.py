"""Where the speed comes from."""

from __future__ import annotations

from collections.abc import Iterator

from .. import compare
from ..registry import REGISTRY, Benchmark, Case, Setting
from ..report import COMPARED, Table

#: One change a step, where a card has them.
STEPS = {
    "PyTorch": "all pairs in memory, float32",
    "torch.compile": "compiled, float32",
    "torch.compile TF32": "compiled, TF32 products",
    "cuDNN attention, torch.compile": "cuDNN's attention as the first pass",
    "numba-cuda, fast": "streamed, float32 on ordinary cores",
    "triton, fast, untuned": "streamed, Tensor Cores",
    "triton, fast": "the same, tuned",
    "hopper, fast": "each pair once (symmetric), Hopper's own instructions",
    "flash-sd-kde TF32": "the authors' kernels",
}


def cases(setting: Setting) -> Iterator[Case]:
    names = STEPS if setting.kind == "cuda" else ["PyTorch", "numpy, fast", "numba, fast"]
    yield from compare.cases(names, ["sdkde"], [setting.at((256, 32, 16), (4096, 512, 16), (32768, 4096, 16))])


REGISTRY.add(
    Benchmark(
        "attribution",
        "readers",
        "Where the speed comes from: eager, compiled, streamed, Tensor Cores, tuned, symmetric.",
        cases,
        compare.measure,
        (Table("SD-KDE, d = 16", ("subject",), {"what": lambda row: STEPS.get(row["subject"], "")} | COMPARED),),
        gpu=True,
        weight=1.5,
    )
)
