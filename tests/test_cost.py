"""The cost model: units, roofs, the paper's figures, and the processors it knows."""

from dataclasses import replace

import pytest
from sdkde_numpy.info import INFO

from benchmarks.paper import paper_model
from sdkde_core.choice import cards, cost, hardware
from sdkde_core.protocol import Problem, Reduction, Work


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


def test_where_units_do_not_overlap_times_add():
    work = Work({"float32": 20.0}, scalar_flops=20.0, exps=12.0, bytes=100.0)
    on = cards.Processor("cpu", {"float32": 10.0}, 10.0, 4.0, 50.0, 0.5, overlaps=False)
    assert cost.work_seconds(work, on) == 0.5 + 2.0 + 2.0 + 3.0 + 2.0


def test_serial_work_has_one_threads_share():
    on = cards.Processor("cpu", {"float32": 10.0}, 10.0, 4.0, 50.0, 0.5, threads=8, overlaps=False)
    work = Work({"float32": 20.0}, exps=12.0)
    alone = cost.work_seconds(replace(work, parallel=False), on) - 0.5
    assert alone == pytest.approx(hardware.speedup(8) * (cost.work_seconds(work, on) - 0.5))


def test_plain_work_counts_pairs():
    problem = Problem(Reduction.LOG_SUM, 100, 200, 16)
    work = cost.plain_work(problem)
    assert work.exps == 100 * 200
    assert work.matrix_flops == {"float64": 2 * 18 * 100 * 200}
    mean = cost.plain_work(Problem(Reduction.MEAN, 100, 200, 16, precision="fast"))
    assert mean.matrix_flops == {"float32": 2 * (18 + 17) * 100 * 200}


def test_a_processor_that_is_not_known_has_no_price():
    assert cost.predict(INFO, Problem(Reduction.MEAN, 10, 10, 2), None) is None


SHEETS = {  # TFLOP/s of fp32, TF32 (0: none), fp16; GB/s: the vendor's figures, at the clock each is quoted at
    "v100": (15.7, 0, 125, 900, None),
    "v100-pcie": (14.1, 0, 112, 900, None),
    "t4": (8.1, 0, 65, 320, None),
    "2080ti": (13.45, 0, 53.8, 616, None),
    "a100-40gb": (19.5, 156, 312, 1555, None),
    "a100-40gb-pcie": (19.5, 156, 312, 1555, None),
    "a100-80gb-pcie": (19.5, 156, 312, 1935, None),
    "a30": (10.3, 82, 165, 933, None),
    "a10": (31.2, 62.5, 125, 600, None),
    "a10g": (35, 35, 70, 600, None),
    "a40": (37.4, 74.8, 149.7, 696, None),
    "a5000": (27.8, 55.6, 111, 768, None),
    "a4000": (19.2, 38.3, 76.7, 448, None),
    "3090": (35.6, 35.6, 71, 936, None),
    "3080": (29.8, 29.8, 59.5, 760, None),
    "l4": (30.3, 60.5, 121, 300, None),
    "l40": (90.5, 90.5, 181, 864, None),
    "6000ada": (91.1, 182.1, 364.2, 960, None),
    "4080": (48.7, 48.7, 97.5, 717, None),
    "h100-pcie": (51.2, 378, 756, 2039, 1.62),
    "h100-nvl": (60.3, 417.5, 835, 3938, 1.545),
    "h200-nvl": (60.3, 417.5, 835, 4800, 1.545),
    "gh200": (66.9, 494.7, 989.4, 4000, 1.83),
    "5090": (104.8, 104.8, 209.5, 1792, None),
    "5080": (56.3, 56.3, 112.6, 960, None),
    "a6000": (38.7, 77.4, 154.8, 768, None),
    "a100": (19.5, 156, 312, 2039, None),
    "h100": (66.9, 494.7, 989.4, 3350, 1.83),
    "h200": (66.9, 494.7, 989.4, 4800, 1.83),
    "l40s": (91.6, 183, 366, 864, None),
    "rtx4090": (82.6, 82.6, 165.2, 1008, None),
    "b200": (70.1, 1120, 2250, 8000, None),
}


def test_every_card_stands_beside_its_data_sheet():
    assert {cards.gpu(name).name for name in SHEETS} == {card.name for card in cards.GPUS}


@pytest.mark.parametrize("name", SHEETS)
def test_gpus_have_their_data_sheets_rates(name):
    card = cards.gpu(name)
    fp32, tf32, fp16, bandwidth, quoted = SHEETS[name]
    boost, at_quoted = card.at(), card.at(quoted)
    assert boost.scalar_flops / 1e12 == pytest.approx(fp32, rel=0.01)
    assert at_quoted.matrix_flops.get("tf32", 0.0) / 1e12 == pytest.approx(tf32, rel=0.01)
    assert at_quoted.matrix_flops["float16"] / 1e12 == pytest.approx(fp16, rel=0.01)
    assert boost.bandwidth == bandwidth * 1e9
    assert boost.exps == pytest.approx(16 * card.sms * card.clock_ghz * 1e9)
    assert "data sheet" in card.source or "whitepaper" in card.source


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
    names = [name for card in cards.GPUS for name in {card.name.lower(), *map(str.lower, card.aliases)}]
    assert len(set(names)) == len(names)
    for card in cards.GPUS:
        assert all(cards.gpu(name) is card for name in (card.name, *card.aliases, card.name.upper()))
        assert cards.card_name(card.name) == card.name  # a database has it as a key
