"""A program that prints what CUDA shows a process, as JSON: its devices in CUDA's order, with what CUDA says of each.

CUDA is not initialised in the user's process: a forked child could then use none of it. It stands alone, and is run by
its path, so that no other module of sdkde has to be imported.
"""

import ctypes
import json
import sys
import uuid
from typing import Any

#: The driver's numbers of attributes (cuda.h), in the order in which their values are printed: multiprocessors, clock
#: and memory clock in kHz, the memory bus's bits, and the compute capability.
ATTRIBUTES = (16, 13, 36, 37, 75, 76)

NO_DEVICE = 100


def devices(cuda: Any) -> list[list[Any]]:
    """Return every device's name and UUID, and its :data:`ATTRIBUTES`.

    Parameters
    ----------
    cuda : ctypes.CDLL
        NVIDIA's driver library.

    Raises
    ------
    OSError
        A function of it fails. An attribute that it does not know is 0.
    """

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise OSError(status, name)

    try:
        call("cuInit", 0)
    except OSError as error:
        if error.errno == NO_DEVICE:
            return []
        raise
    count, found = ctypes.c_int(), []
    call("cuDeviceGetCount", ctypes.byref(count))
    for i in range(count.value):
        device, value = ctypes.c_int(), ctypes.c_int()
        name, identity = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        call("cuDeviceGet", ctypes.byref(device), i)
        call("cuDeviceGetName", name, len(name), device)
        text = name.value.decode(errors="replace")
        newer = hasattr(cuda, "cuDeviceGetUuid_v2")  # which knows MIG slices, from CUDA 11.4 on
        call("cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid", identity, device)
        values = []
        for attribute in ATTRIBUTES:
            unknown = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            values.append(0 if unknown else value.value)
        kind = "MIG" if " MIG " in text else "GPU"
        found.append([text, f"{kind}-{uuid.UUID(bytes=identity.raw)}", *values])
    return found


if __name__ == "__main__":
    print(json.dumps(devices(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))))
