"""The cost model: units, roofs, the paper's figures, and the processors it knows."""

from dataclasses import replace

import pytest

from benchmarks.paper import paper_model
from sdkde_core.choice import cards, cost, hardware
from sdkde_core.protocol import Work


def test_the_papers_figures_by_pass_with_their_units():
    model = paper_model(32768)
    flops_per_pair, bytes_per_pair = model.score.flops / 32768**2, model.score.bytes / 32768**2
    assert flops_per_pair == 76.0  # FLOP
    assert model.tile_bytes == 73_984  # bytes
    assert bytes_per_pair == pytest.approx(1.129, abs=5e-4)  # bytes
    assert model.total.flops / 32768**2 == 81.5  # FLOP
    assert model.score.intensity == pytest.approx(67.3, abs=0.05)  # FLOP/byte
    assert model.total.intensity == pytest.approx(64.6, abs=0.05)  # FLOP/byte
    assert model.published_intensity == pytest.approx(72.2, abs=0.05)  # FLOP/byte, two passes over one's bytes


GPU = cards.Processor("toy", {"float16": 100.0, "float32": 10.0}, 10.0, 4.0, 50.0, 0.5, transfer=25.0)


def test_time_is_the_largest_roof_after_what_nothing_hides():
    work = Work({"float16": 300.0, "float32": 20.0}, scalar_flops=20.0, exps=12.0, bytes=100.0, transfer_bytes=50.0)
    assert cost.roofs(work, GPU) == {
        "matrix float16": 3.0,
        "matrix float32": 2.0,
        "scalar": 2.0,
        "exp": 3.0,
        "memory": 2.0,
        "transfer": 2.0,
        "launch": 0.5,
    }
    assert cost.work_seconds(work, GPU) == 2.0 + 0.5 + 5.0  # both products on one unit


def test_serial_work_has_one_threads_share():
    on = cards.Processor("cpu", {"float32": 10.0}, 10.0, 4.0, 50.0, 0.5, threads=8, overlaps=False)
    work = Work({"float32": 20.0}, exps=12.0)
    alone = cost.work_seconds(replace(work, parallel=False), on) - 0.5
    assert alone == pytest.approx(hardware.speedup(8) * (cost.work_seconds(work, on) - 0.5))


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"),
        ("Quadro RTX 6000", None),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("GRID A100-10C", None),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("Tesla V100S-PCIE-32GB", None),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", None),
        ("Tesla T4", "T4"),
        ("RTX 4090", "GeForce RTX 4090"),
        ("rtx-4090", "GeForce RTX 4090"),
        ("4090", "GeForce RTX 4090"),
        ("A6000", "RTX A6000"),
        ("h100 sxm", "H100 SXM"),
        ("a6000 h100", None),
        ("", None),
    ],
)
def test_cards_by_the_drivers_name(driver_name, name):
    card = cards.gpu(driver_name)
    assert (card.name if card else None) == name


def test_every_name_is_one_cards():
    assert all("data sheet" in card.source or "whitepaper" in card.source for card in cards.GPUS)
    names = [name for card in cards.GPUS for name in {card.name.lower(), *map(str.lower, card.aliases)}]
    assert len(set(names)) == len(names)
    for card in cards.GPUS:
        assert all(cards.gpu(name) is card for name in (card.name, *card.aliases, card.name.upper()))
        assert cards.card_name(card.name) == card.name  # a database has it as a key
