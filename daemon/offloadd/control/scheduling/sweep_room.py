"""How many jobs on one model the device has room for at once, as far as that has been measured.

Pure. Members of a sweep share the weights, and each has its own activations. On a CPU these are
host memory like everything else, and not bounded here.
"""

from __future__ import annotations

from offloadd.channel.messages import DeviceReport


def jobs_that_fit(device: DeviceReport | None, activations_bytes: int) -> int | None:
    """At least 1; None where nothing bounds them.

    `device` was measured while no job computed; `activations_bytes` is the most that a job on the
    model has taken by itself, 0 while none has ended: then the first is alone.
    """
    if device is None or device.device == "cpu":
        return None
    if not activations_bytes:
        return 1
    return max((device.free_bytes + device.reusable_bytes) // activations_bytes, 1)
