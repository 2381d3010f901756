"""Has models planned before they are loaded, by a process that lives for one question.

Promises: the control plane waits for nothing; one process at a time, which ends in bounded time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from offload_protocol import codec
from offload_protocol.errors import Busy, InternalError
from offload_protocol.records import Forecast
from offload_protocol.sizes import parse_size_bytes
from offloadd.channel.forecasts import ForecastAnswer, ForecastOrder
from offloadd.channel.messages import DeviceReport
from offloadd.channel.specs import ModelSpec
from offloadd.control.models.models import ModelTable
from offloadd.control.workers.child import child
from offloadd.control.workers.supervisor import worker_environment

COMMAND = (sys.executable, "-P", "-m", "offloadd.hosting.planning.forecast_process")
PATIENCE_S = 120.0


class Forecasts:
    """The questions under way, asked one after the other.

    `device` gives what the worker said last, `host_budget_bytes` what the store may take.
    """

    def __init__(
        self,
        models: ModelTable,
        device: Callable[[], DeviceReport | None],
        host_budget_bytes: Callable[[], int],
        environ: Mapping[str, str],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._models = models
        self._device = device
        self._host_budget_bytes = host_budget_bytes
        self._environ = worker_environment(environ)
        self._command = tuple(command)
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[Forecast]] = set()

    def ask(self, spec: ModelSpec, host_budget: str | None) -> asyncio.Future[Forecast]:
        """Plan a model; the future fails with the `OffloadError` that refuses it.

        Raises `Busy` before a worker has found its device, `InvalidRequest` for a budget.
        """
        report = self._device()
        if report is None:
            raise Busy("no worker has found its device yet", hint="ask again in some seconds")
        host_bytes = self._host_budget_bytes()
        if host_budget is not None:
            host_bytes = parse_size_bytes(host_budget, whole_bytes=host_bytes)
        order = ForecastOrder(
            spec=spec,
            on_cpu=report.device == "cpu",
            device_bytes=report.total_bytes,
            free_bytes=report.free_bytes + report.resident_bytes,
            host_budget_bytes=host_bytes,
            link_bytes_per_s=report.link_bytes_per_s,
            compute_s=self._compute_s(spec, report),
        )
        task = asyncio.get_running_loop().create_task(self._ask(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _compute_s(self, spec: ModelSpec, report: DeviceReport) -> dict[str, float]:
        """What was measured of a hosted model with the same weights in the same dtype."""
        same = (spec.source, spec.dtype, spec.variant)
        names = [
            one.spec.name
            for one in self._models
            if (one.spec.source, one.spec.dtype, one.spec.variant) == same
        ]
        found: dict[str, float] = {}
        for owner, seconds in report.compute_s.items():
            model, _, component = owner.rpartition("/")
            if model in names:
                found[component] = seconds
        return found

    async def _ask(self, order: ForecastOrder) -> Forecast:
        async with (
            self._one_at_a_time,
            child(self._command, self._environ, "plans") as process,
        ):
            try:
                told = msgspec.json.encode(order)
                said, _ = await asyncio.wait_for(process.communicate(told), PATIENCE_S)
            except TimeoutError:
                raise InternalError(
                    f"planning took longer than {PATIENCE_S:.0f} s and was given up"
                ) from None
        try:
            answer = msgspec.json.decode(said, type=ForecastAnswer)
        except msgspec.DecodeError:
            raise InternalError(
                f"the process that plans ended with {process.returncode} and no answer",
                hint="see the daemon's log",
            ) from None
        if answer.error is not None:
            raise codec.to_exception(answer.error)
        if answer.forecast is None:
            raise InternalError("the process that plans gave no forecast")
        return answer.forecast
