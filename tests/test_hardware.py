"""The GPUs that are here: by what the Linux driver publishes, by NVML, and by CUDA, of which fakes stand in."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sdkde_core.choice import cards, cuda_devices, driver, hardware


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
        forget()
        return fake

    def forget():
        for kept in (driver._listed_gpus, driver._sliced, driver.driver_version):
            kept.cache_clear()

    yield install
    forget()


@pytest.fixture
def cuda(monkeypatch):
    """Let CUDA show these devices; None: it does not answer. Returns what it was asked with."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    asked = []

    def install(*devices):
        answer = None if devices == (None,) else devices
        monkeypatch.setattr(driver, "_cuda_devices", lambda *environment: (asked.append(environment), answer)[1])
        return asked

    install(None)
    return install


#: What CUDA says of some cards: multiprocessors, clock and memory clock (kHz), bits of the bus, compute capability.
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
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": (14, 1_410_000, 1_215_000, 640, 8, 0),
    "NVIDIA GB10": (48, 2_418_000, 0, 0, 12, 1),
    "NVIDIA R999": (100, 2_000_000, 5_000_000, 4096, 14, 0),
    "NVIDIA GeForce GTX 1080": (20, 1_733_000, 5_005_000, 256, 6, 1),
}


def device(name, uuid="GPU-1"):
    return driver.CudaDevice(name, uuid, *SAID[name])


def listed(monkeypatch, *names):
    gpus = tuple(hardware.ListedGPU(name, f"GPU-{i}") for i, name in enumerate(names))
    monkeypatch.setattr(driver, "_listed_gpus", lambda root: gpus)


def names(root=driver.PROC):
    return tuple(gpu.name for gpu in hardware.visible_gpus(root))


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
    """By what the driver publishes, and by NVML where it publishes nothing, both by bus."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(driver, "_cuda_devices", lambda *environment: None)
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
    for given, shown in cases.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert names(tmp_path) == shown, given
    assert hardware.driver_version(tmp_path) == "570.1"
    assert published or fake.open == 0


@pytest.mark.parametrize("fake", [None, FakeNVML(GPUS, works=False), FakeNVML()])
def test_no_gpu_is_listed_without_a_driver(tmp_path, monkeypatch, nvml, fake):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml(fake)
    assert names(tmp_path) == ()
    assert hardware.driver_version(tmp_path) == ("570.1" if fake and fake.works else "")


def test_what_the_linux_driver_publishes_wakes_no_card(tmp_path, monkeypatch, nvml):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    _publish(tmp_path, GPUS)
    nvml(SimpleNamespace())  # no function of it may be called
    assert names(tmp_path) == tuple(GPUS.values())
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


def test_rates_by_device(monkeypatch, cuda):
    listed(monkeypatch, "NVIDIA RTX A6000", "NVIDIA RTX A6000")
    asked = cuda(None)
    assert hardware.processor("cuda:1").name == hardware.processor("cuda").name == "RTX A6000"
    assert hardware.processor("cuda:2") is None
    assert hardware.processor("mps") is None
    assert asked == []  # cards of the table cost nothing


# --- what CUDA says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SAID if cards.gpu(name)])
def test_rates_that_are_derived_are_those_of_the_data_sheet(name):
    """So the bandwidth's factor, the clock and the rates by compute capability are right, and halved where they are."""
    known, found = cards.gpu(name).at(), hardware._derived(device(name)).at()
    assert found.name == known.name
    assert found.matrix_flops == pytest.approx(known.matrix_flops, rel=1e-6)
    assert (found.scalar_flops, found.exps) == pytest.approx((known.scalar_flops, known.exps), rel=1e-6)
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=0.03)
    assert found.transfer == known.transfer


def test_cards_that_are_in_no_table_are_derived(monkeypatch, cuda):
    laptop = "NVIDIA GeForce RTX 4090 Laptop GPU"
    listed(monkeypatch, laptop)
    asked = cuda(device(laptop))
    card = hardware.card("cuda:0")
    assert (card.name, card.architecture, card.sms) == ("GeForce RTX 4090 Laptop GPU", "sm_89", 76)
    assert card.at().matrix_flops["float16"] == 512 * 76 * 2.04e9
    assert card.at().bandwidth == pytest.approx(576e9, rel=1e-3)
    assert "76 multiprocessors at 2.04 GHz" in card.source
    assert hardware.processor("cuda").exps == 16 * 76 * 2.04e9
    assert hardware.card_called("rtx 4090 laptop") == card
    assert len(asked) > 0
    cuda(None)
    assert hardware.card("cuda:0") is None


def test_what_a_card_lacks_it_has_no_rate_of():
    turing, new = (hardware._derived(device(name)) for name in ("Tesla T4", "NVIDIA R999"))
    assert set(turing.at().matrix_flops) == {"float16", "float32", "float64"}
    assert hardware._derived(device("NVIDIA GeForce GTX 1080")) is None  # before compute capability 7.0
    assert new.architecture == "sm_140"
    assert new.matrix == cards.derived("x", 120, 100, 2.0).matrix  # as the newest that is known
    shared = hardware._derived(device("NVIDIA GB10"))  # of whose memory CUDA says nothing
    assert 100e9 < shared.bandwidth < 1e12
    assert cards.derived("x", 90, 0, 2.0) is cards.derived("x", 90, 132, 0.0) is None


def test_a_slice_is_not_its_card(tmp_path, monkeypatch, nvml, cuda):
    """Neither one that CUDA_VISIBLE_DEVICES names, nor the one that CUDA shows where a card is sliced."""
    whole, part = "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    _publish(tmp_path, {"GPU-1": whole})
    nvml(None)
    asked = cuda(device(part, "MIG-7"))
    assert names(tmp_path) == (whole,)
    assert not asked
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    assert hardware.visible_gpus(tmp_path) == ((part, "MIG-7"),)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "capabilities" / "gpu0" / "mig" / "gi7").mkdir(parents=True)
    nvml(None)
    assert names(tmp_path) == (part,)
    found = hardware._derived(device(part))
    assert (found.name, found.sms) == ("A100-SXM4-40GB MIG 1g.5gb", 14)
    assert found.bandwidth == pytest.approx(1555e9 / 8, rel=1e-3)


def test_cudas_order_is_not_the_drivers(monkeypatch, cuda):
    """Where cards differ the fastest is cuda:0, unless the environment says otherwise."""
    listed(monkeypatch, "Tesla T4", "NVIDIA H200")
    asked = cuda(device("NVIDIA H200", "GPU-1"), device("Tesla T4", "GPU-0"))
    assert hardware.visible_gpus() == (("NVIDIA H200", "GPU-1"), ("Tesla T4", "GPU-0"))
    assert [card.name for card in hardware.local_cards()] == ["H200 SXM", "T4"]
    assert hardware.processor("cuda:1").name == "T4"
    assert set(asked) == {(None, None)}
    asked.clear()
    for variable, value, shown in (
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", ("Tesla T4", "NVIDIA H200")),
        ("CUDA_VISIBLE_DEVICES", "GPU-0,GPU-1", ("Tesla T4", "NVIDIA H200")),  # by UUID there is nothing to ask
        ("CUDA_VISIBLE_DEVICES", "", ()),
    ):
        monkeypatch.setenv(variable, value)
        assert names() == shown
        monkeypatch.delenv(variable)
    assert not asked
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cuda(device("NVIDIA H200", "GPU-1"))
    assert names() == ("NVIDIA H200",)
    assert asked == [("0", None)]
    cuda(None)  # CUDA does not answer
    assert names() == ("Tesla T4",)


def test_cards_whose_uuids_the_driver_has_not_read(monkeypatch, cuda):
    """Until somebody uses a card the driver publishes question marks."""
    gpus = (hardware.ListedGPU("NVIDIA L4", "GPU-????????-????"),) * 2
    monkeypatch.setattr(driver, "_listed_gpus", lambda root: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert len(hardware.visible_gpus()) == 2
    cuda(device("NVIDIA L4", "GPU-27c5"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-27c5")
    assert hardware.visible_gpus() == (("NVIDIA L4", "GPU-27c5"),)


@pytest.fixture
def asking(monkeypatch):
    """Let the process that asks CUDA print a text, or fail with an error."""
    driver._cuda_devices.cache_clear()

    def install(answer):
        def run(code, *arguments, **options):
            assert options["timeout"] > 0
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(stdout=answer)

        driver._cuda_devices.cache_clear()
        monkeypatch.setattr(driver, "run_python", run)

    yield install
    driver._cuda_devices.cache_clear()


def test_cuda_is_asked_in_a_process_of_its_own_and_may_fail(asking, monkeypatch):
    said = device("Tesla T4")
    asking(f"a library says hello\n{json.dumps([said])}\n")
    assert driver.cuda_devices() == (said,)
    asking("[]\n")
    assert driver.cuda_devices() == ()
    for failure in (
        subprocess.TimeoutExpired("python", 30),
        subprocess.CalledProcessError(1, "python"),
        OSError("no such interpreter"),
        "",
        "no JSON",
        "[[1]]",
    ):
        asking(failure)
        assert driver.cuda_devices() is None
    asking("[]\n")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert driver.cuda_devices() is None


class FakeCuda:
    """NVIDIA's driver library, with some cards; ``status`` is what cuInit returns."""

    def __init__(self, *given, status=0, newer=True):
        self.given, self.status = given, status
        if newer:
            self.cuDeviceGetUuid_v2 = self.cuDeviceGetUuid

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.given)
        return 0

    def cuDeviceGet(self, device, i):
        device._obj.value = i
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = self.given[device.value].encode()
        return 0

    def cuDeviceGetUuid(self, identity, device):
        identity.raw = bytes([device.value] * 16)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        found = SAID[self.given[device.value]][cuda_devices.ATTRIBUTES.index(attribute)]
        value._obj.value = found or 77
        return 0 if found else 1  # what is not known is an error


@pytest.mark.parametrize("newer", [True, False])
def test_the_program_that_asks_cuda(newer):
    found = cuda_devices.devices(FakeCuda("NVIDIA GB10", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", newer=newer))
    assert [driver.CudaDevice(*values) for values in json.loads(json.dumps(found))] == [
        device("NVIDIA GB10", "GPU-00000000-0000-0000-0000-000000000000"),
        device("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-01010101-0101-0101-0101-010101010101"),
    ]
    assert cuda_devices.devices(FakeCuda(status=100)) == []
    with pytest.raises(OSError, match="cuInit"):
        cuda_devices.devices(FakeCuda(status=999))


def test_the_program_stands_alone():
    """Without a driver it fails; with one it answers. It needs nothing but the standard library."""
    done = subprocess.run([sys.executable, "-I", "-S", cuda_devices.__file__], capture_output=True, text=True)
    assert done.stdout.startswith("[") if done.returncode == 0 else "libcuda" in done.stderr or "cuInit" in done.stderr


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
