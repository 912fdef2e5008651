"""The GPUs that are here: by what the Linux driver publishes, and by NVML, of which a fake stands in."""

import sys
from types import SimpleNamespace

import pytest

from sdkde_core.choice import hardware


class FakeNVML:
    """What is used of pynvml: cards by name and UUID, or a driver that does not answer."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, gpus=(), works=True):
        self.gpus, self.works, self.open = dict(gpus), works, 0

    def nvmlInit(self):
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
        if uuid not in self.gpus:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, gpu):
        return gpu

    def nvmlDeviceGetName(self, gpu):
        return self.gpus[gpu]

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        return 1980

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=7)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=80 << 30, used=3 << 20)


GPUS = {"GPU-07c5-aa": "NVIDIA H200", "GPU-17c5-aa": "NVIDIA RTX A6000", "GPU-27c5-aa": "NVIDIA L4"}


@pytest.fixture
def nvml(monkeypatch):
    """Install a fake; None: nvidia-ml-py is not there."""

    def install(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        hardware._listed_gpus.cache_clear()
        hardware.driver_version.cache_clear()
        return fake

    yield install
    hardware._listed_gpus.cache_clear()
    hardware.driver_version.cache_clear()


def _publish(root, gpus, driver="570.1"):
    """As the Linux driver does."""
    for i, (uuid, name) in enumerate(gpus.items()):
        folder = root / "gpus" / f"0000:{i}1:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nGPU UUID: \t {uuid}\n")
    (root / "version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release\nGCC 15.3\n"
    )


@pytest.mark.parametrize("published", [True, False])
def test_visible_gpus_are_those_that_cuda_would_show(tmp_path, monkeypatch, nvml, published):
    """By what the driver publishes, and by NVML where it publishes nothing."""
    if published:
        _publish(tmp_path, GPUS)
    fake = nvml(None if published else FakeNVML(GPUS))
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
    for given, names in cases.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert hardware.local_gpus(tmp_path) == names, given
    assert hardware.driver_version(tmp_path) == "570.1"
    assert published or fake.open == 0


@pytest.mark.parametrize("fake", [None, FakeNVML(GPUS, works=False), FakeNVML()])
def test_no_gpu_is_listed_without_a_driver(tmp_path, monkeypatch, nvml, fake):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml(fake)
    assert hardware.local_gpus(tmp_path) == ()
    assert hardware.driver_version(tmp_path) == ("570.1" if fake and fake.works else "")


def test_what_the_linux_driver_publishes_wakes_no_card(tmp_path, monkeypatch, nvml):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _publish(tmp_path, GPUS)
    nvml(SimpleNamespace())  # no function of it may be called
    assert hardware.local_gpus(tmp_path) == tuple(GPUS.values())
    assert hardware.driver_version(tmp_path) == "570.1"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC 12.2.0", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build", "560.35.03"),
        ("nothing", ""),
    ],
)
def test_the_drivers_version(tmp_path, nvml, line, version):
    nvml(None)
    (tmp_path / "version").write_text(line)
    assert hardware.driver_version(tmp_path) == version
    assert hardware.driver_version(tmp_path / "absent") == ""


def test_rates_by_device(monkeypatch):
    monkeypatch.setattr(hardware, "local_gpus", lambda: ("NVIDIA H200", "NVIDIA RTX A6000"))
    assert hardware.processor("cuda:1").name == "RTX A6000"
    assert hardware.processor("cuda").name == "H200 SXM"
    assert hardware.processor("cuda:2") is None
    assert hardware.processor("mps") is None


def test_a_cards_clock_and_load(monkeypatch, nvml):
    """Of the card that CUDA numbers so: NVML does not know CUDA_VISIBLE_DEVICES."""
    provenance = pytest.importorskip("sdkde_autotune.provenance")
    fake = nvml(FakeNVML(GPUS))
    monkeypatch.setattr(hardware, "visible_gpus", lambda: (hardware.ListedGPU("NVIDIA L4", "GPU-27c5-aa"),))
    asked = []
    monkeypatch.setattr(fake, "nvmlDeviceGetHandleByUUID", lambda uuid: asked.append(uuid) or uuid)
    assert provenance.clocks("cuda:0") == {"sm_mhz": 1200, "sm_mhz_most": 1980, "load_percent": 7, "memory_mib": 3.0}
    assert asked == ["GPU-27c5-aa"]
    assert provenance.clocks("cuda:1") == {}
    nvml(FakeNVML(works=False))
    assert provenance.clocks("cuda") == {}
