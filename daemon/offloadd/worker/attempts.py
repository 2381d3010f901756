"""Does what may fail, and makes plain data of the failure, which holds nothing else in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from offload_protocol.codec import error_info
from offload_protocol.errors import InternalError
from offload_protocol.records import ErrorInfo
from offloadd.channel.framing import ChannelClosed
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import give_memory_back
from offloadd.worker.baton import Baton
from offloadd.worker.device import Device, measure
from offloadd.worker.exits import DEVICE_FAULT
from offloadd.worker.failures import is_device_fault, is_out_of_memory, sentence, to_offload_error
from offloadd.worker.receiver import end_process

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt(Generic[Result]):
    """The result of some work, or its error."""

    result: Result | None = None
    error: ErrorInfo | None = None
    ran_out_of_memory: bool = False


class Attempts:
    """Judges what the work on one device raises; a fault of the device ends the process."""

    def __init__(self, device: Device, host: DeviceHost, baton: Baton) -> None:
        self._device = device
        self._host = host
        self._baton = baton

    def make(
        self, work: Callable[[], Result], *, has_baton: bool, loads: bool = False
    ) -> Attempt[Result]:
        """Do the work; `has_baton` says whether the caller holds the device meanwhile.

        `loads` says that it is about a model's files, and not about a job's arguments.
        """
        try:
            return Attempt(work())
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001 - a pipeline raises anything, and the next job runs
            if is_device_fault(error):
                _log.critical("the device failed, ending: %s", sentence(error))
                end_process(DEVICE_FAULT)
            ran_out = is_out_of_memory(error)
            if has_baton or not ran_out:
                info = self._told(error, ran_out, loads)
            else:
                # What the device has is known where nobody computes; nothing else waits for that.
                with self._baton.held():
                    info = self._told(error, ran_out, loads)
        # Here the exception is gone, and with it the frames that held its tensors.
        if ran_out:
            give_memory_back(self._device.torch_device)
        return Attempt(error=info, ran_out_of_memory=ran_out)

    def make_twice(self, work: Callable[[], Result]) -> Attempt[Result]:
        """Do the work, and once more if it ran out of memory: with a smaller plan, from its start.

        The caller holds the device. Weights, which can come back, leave it before.
        """
        attempt = self.make(work, has_baton=True)
        if not attempt.ran_out_of_memory or attempt.error is None:
            return attempt
        needed_bytes = attempt.error.details.get("needed_bytes", 0)
        _log.warning("trying once more with a smaller plan: %s", attempt.error.message)
        self._host.engine.empty()
        give_memory_back(self._device.torch_device)
        self._host.plan_smaller(needed_bytes)
        return self.make(work, has_baton=True)

    def _told(self, error: Exception, ran_out: bool, loads: bool) -> ErrorInfo:
        told = to_offload_error(
            error,
            measure(self._device).free_bytes if ran_out else 0,
            str(self._device.torch_device),
            self._host.engine.explain() if ran_out else "",
            loads=loads,
        )
        if isinstance(told, InternalError):
            _log.error("unexpected %s", type(error).__name__, exc_info=error)
        return error_info(told)
