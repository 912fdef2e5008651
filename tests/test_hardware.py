"""The GPUs that are here, by NVML. A fake stands in for it."""

import sys
from types import SimpleNamespace

import pytest

from sdkde_core.choice import cards, hardware

#: What the driver says of cards: multiprocessors, clock and memory clock (kHz), bits of the bus, compute capability.
SAID = {
    "NVIDIA RTX A6000": (84, 1_800_000, 8_001_000, 384, 8, 6),
    "NVIDIA A100-SXM4-80GB": (108, 1_410_000, 1_593_000, 5120, 8, 0),
    "NVIDIA A100-SXM4-40GB": (108, 1_410_000, 1_215_000, 5120, 8, 0),
    "NVIDIA H100 80GB HBM3": (132, 1_980_000, 2_619_000, 5120, 9, 0),
    "NVIDIA H100 PCIe": (114, 1_755_000, 1_593_000, 5120, 9, 0),
    "NVIDIA H200": (132, 1_980_000, 3_201_000, 6144, 9, 0),
    "NVIDIA L40S": (142, 2_520_000, 9_001_000, 384, 8, 9),
    "NVIDIA GeForce RTX 4090": (128, 2_520_000, 10_501_000, 384, 8, 9),
    "NVIDIA GeForce RTX 3090": (82, 1_695_000, 9_751_000, 384, 8, 6),
    "NVIDIA GeForce RTX 5090": (170, 2_407_000, 14_001_000, 512, 12, 0),
    "NVIDIA L4": (58, 2_040_000, 6_251_000, 192, 8, 9),
    "Tesla T4": (40, 1_590_000, 5_001_000, 256, 7, 5),
    "Tesla V100-SXM2-16GB": (80, 1_530_000, 877_000, 4096, 7, 0),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (76, 2_040_000, 9_001_000, 256, 8, 9),
    "NVIDIA GB10": (48, 2_418_000, 0, 0, 12, 1),
    "NVIDIA R999": (100, 2_000_000, 5_000_000, 4096, 14, 0),
    "NVIDIA GeForce GTX 1080": (20, 1_733_000, 5_005_000, 256, 6, 1),
}

GPUS = {"GPU-07c5-aa": "NVIDIA H200", "GPU-17c5-aa": "NVIDIA RTX A6000", "GPU-27c5-aa": "NVIDIA L4"}

#: Slices of a card, by their UUIDs: (name, multiprocessors, MiB).
SLICES = {
    "MIG-5": ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 20 << 10),
    "MIG-7": ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, 5 << 10),
}


class FakeNVML:
    """What is used of pynvml: cards by UUID and name, of :data:`SAID`, or a driver that does not answer.

    The cards in ``sliced`` have the slices that are listed there. A handle is the UUID.
    """

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, gpus=(), works=True, sliced=None):
        self.gpus, self.works, self.sliced, self.open, self.asked = dict(gpus), works, sliced or {}, 0, 0

    def said(self, gpu):
        if self.gpus[gpu] not in SAID:
            raise self.NVMLError("Not Supported")
        return SAID[self.gpus[gpu]]

    def nvmlInit(self):
        self.asked += 1
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "570.1"

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, i):
        return list(self.gpus)[i]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetUUID(self, gpu):
        return gpu

    def nvmlDeviceGetName(self, gpu):
        return SLICES[gpu][0] if gpu in SLICES else self.gpus[gpu]

    def nvmlDeviceGetMigMode(self, gpu):
        if gpu in self.sliced:
            return [1, 1]
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, i):
        if i >= len(self.sliced[gpu]):
            raise self.NVMLError("Not Found")
        return self.sliced[gpu][i]

    def nvmlDeviceGetAttributes(self, part):
        _, sms, mib = SLICES[part]
        return SimpleNamespace(multiprocessorCount=sms, memorySizeMB=mib)

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return self.said(gpu)[4:]

    def nvmlDeviceGetNumGpuCores(self, gpu):
        sms, *_, major, minor = self.said(gpu)
        return sms * (64 if (major, minor) in ((7, 0), (7, 5), (8, 0)) else 128)

    def nvmlDeviceGetMemoryBusWidth(self, gpu):
        if not self.said(gpu)[3]:
            raise self.NVMLError("Not Supported")
        return self.said(gpu)[3]

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        return self.said(gpu)[kind] // 1000

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=7 if self.gpus[gpu] == "NVIDIA L4" else 0)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=40 << 30)


@pytest.fixture
def nvml(monkeypatch):
    """Install a fake; None: nvidia-ml-py is not there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def install(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        forget()
        return fake

    def forget():
        hardware._listed.cache_clear()
        hardware.driver_version.cache_clear()

    yield install
    forget()


def numbered(*names):
    """A fake with these cards, GPU-0 first."""
    return FakeNVML({f"GPU-{i}": name for i, name in enumerate(names)})


def names():
    return tuple(gpu.name for gpu in hardware.visible_gpus())


def derived(name):
    """What follows from the driver's words of the card alone."""
    (said,) = (gpu[2:] for gpu in hardware.visible_gpus() if gpu.name == name)
    return cards.derived(name, *said)


def test_visible_gpus_are_those_that_cuda_would_show(monkeypatch, nvml):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    fake = nvml(FakeNVML(GPUS))
    everything = ("NVIDIA H200", "NVIDIA RTX A6000", "NVIDIA L4")
    cases = {
        None: everything,
        "0,1,2": everything,
        "2,0": ("NVIDIA L4", "NVIDIA H200"),
        "1": ("NVIDIA RTX A6000",),
        "GPU-27c5": ("NVIDIA L4",),
        "": (),
        "-1": (),
        "0,7,1": ("NVIDIA H200",),  # up to the first that there is not
        "0,0": ("NVIDIA H200",),
        "GPU-": (),  # of several
        "MIG-27c5": (),
        "1,MIG-GPU-27c5/1/0": ("NVIDIA RTX A6000",),
    }
    for given, shown in cases.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert names() == shown, given
    assert hardware.driver_version() == "570.1"
    assert (fake.asked, fake.open) == (2, 0)  # once for the list, once for the version


@pytest.mark.parametrize("fake", [None, FakeNVML(GPUS, works=False), FakeNVML()])
def test_no_gpu_is_listed_without_a_driver(nvml, fake):
    nvml(fake)
    assert names() == ()
    assert hardware.driver_version() == ("570.1" if fake and fake.works else "")


def test_rates_by_device(nvml):
    nvml(numbered("NVIDIA RTX A6000", "NVIDIA RTX A6000"))
    assert hardware.processor("cuda:1").name == hardware.processor("cuda").name == "RTX A6000"
    assert hardware.processor("cuda:2") is None
    assert hardware.processor("mps") is None


@pytest.mark.parametrize("name", [name for name in SAID if cards.gpu(name)])
def test_rates_that_are_derived_are_those_of_the_data_sheet(name, nvml):
    """So the bandwidth's factor, the clock and the rates by compute capability are right, and halved where they are."""
    nvml(numbered(name))
    known, found = cards.gpu(name).processor, derived(name).processor
    assert found.name == known.name
    assert found.matrix_flops == pytest.approx(known.matrix_flops, rel=1e-6)
    assert (found.scalar_flops, found.exps) == pytest.approx((known.scalar_flops, known.exps), rel=1e-6)
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=0.03)
    assert found.transfer == known.transfer


def test_cards_that_are_in_no_table_are_derived(nvml):
    nvml(numbered("NVIDIA GeForce RTX 4090 Laptop GPU"))
    card = hardware.card("cuda:0")
    assert (card.name, card.architecture, card.sms) == ("GeForce RTX 4090 Laptop GPU", "sm_89", 76)
    assert card.processor.matrix_flops["float16"] == 512 * 76 * 2.04e9
    assert card.processor.bandwidth == pytest.approx(576e9, rel=1e-3)
    assert "76 multiprocessors at 2.04 GHz" in card.source
    assert hardware.processor("cuda").exps == 16 * 76 * 2.04e9
    assert hardware.card_called("rtx 4090 laptop") == card
    nvml(numbered("NVIDIA of which nothing is known"))
    assert len(names()) == 1 and hardware.card("cuda:0") is None


def test_what_a_card_lacks_it_has_no_rate_of(nvml):
    asked = ("Tesla T4", "NVIDIA R999", "NVIDIA GeForce GTX 1080", "NVIDIA GB10")
    nvml(numbered(*asked))
    turing, new, old, shared = map(derived, asked)
    assert set(turing.processor.matrix_flops) == {"float16", "float32", "float64"}
    assert old is None  # before compute capability 7.0
    assert new.architecture == "sm_140"
    newest = cards.derived("x", 120, 100, 2.0).processor
    assert new.processor.matrix_flops == newest.matrix_flops
    assert 100e9 < shared.bandwidth < 1e12  # of its memory the driver says nothing
    assert cards.derived("x", 90, 0, 2.0) is cards.derived("x", 90, 132, 0.0) is None


def test_a_slice_is_not_its_card(monkeypatch, nvml):
    """CUDA shows a sliced card as its first slice, and the others where CUDA_VISIBLE_DEVICES names them."""
    nvml(FakeNVML({"GPU-1": "NVIDIA A100-SXM4-40GB", "GPU-2": "NVIDIA L4"}, sliced={"GPU-1": list(SLICES)}))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    large, small = (SLICES[uuid][0] for uuid in SLICES)
    assert names() == (large, "NVIDIA L4")
    for given, shown in {"MIG-7": (small,), "MIG-5,MIG-7": (large, small), "0": (large,), "1": ("NVIDIA L4",)}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert names() == shown, given
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    found = hardware.card("cuda:0")
    assert (found.name, found.sms) == ("A100-SXM4-40GB MIG 1g.5gb", 14)
    assert found.bandwidth == pytest.approx(1555e9 / 8, rel=1e-3)
    nvml(FakeNVML({"GPU-1": "NVIDIA A100-SXM4-40GB"}, sliced={"GPU-1": []}))
    assert names() == ()


def test_cudas_order_is_not_the_drivers(monkeypatch, nvml):
    """Where cards differ the fastest is cuda:0, unless the environment says otherwise."""
    nvml(numbered("Tesla T4", "NVIDIA L4", "NVIDIA H200"))
    assert names() == ("NVIDIA H200", "Tesla T4", "NVIDIA L4")
    assert [card.name for card in hardware.local_cards()] == ["H200 SXM", "T4", "L4"]
    for variable, value, shown in (
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", ("Tesla T4", "NVIDIA L4", "NVIDIA H200")),
        ("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-2", ("Tesla T4", "NVIDIA H200")),
        ("CUDA_VISIBLE_DEVICES", "0", ("NVIDIA H200",)),
        ("CUDA_VISIBLE_DEVICES", "", ()),
    ):
        monkeypatch.setenv(variable, value)
        assert names() == shown
        monkeypatch.delenv(variable)
