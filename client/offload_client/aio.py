"""The client for asyncio programs: the twin of `offload_client.client`, awaited.

It belongs to the event loop that it was opened in, and starts neither thread nor task.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from offload_client.aio_job import AsyncJob
from offload_client.aio_waiting import Looping
from offload_client.core import (
    QUICK_TIMEOUT_S,
    Settings,
    load_fields,
    plan_fields,
    program_name,
    rows_of_jobs,
    rows_of_models,
)
from offload_client.results import Progress, Result, progress_of
from offload_protocol import messages
from offload_protocol.codec import convert
from offload_protocol.records import Forecast, JobInfo, JobState, ModelInfo


class AsyncClient(Looping):
    """A connection to the daemon, opened by the first call or by `async with`.

        from offload_client import AsyncClient

        async with AsyncClient() as client:
            result = await client.generate("shapes", "a red circle on a white background", seed=7)
            result.image.save("red.png")

    Arguments, errors and promises are those of `Client`. One event loop may have many calls under
    way at once; each loop and each forked child makes its own client.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        program: str | None = None,
        connect_timeout_s: float = 2.0,
        timeout_s: float | None = None,
        reconnect_timeout_s: float = 30.0,
        retry_busy: bool = True,
        key_file: str | os.PathLike[str] | None = None,
        server_key: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            Settings(
                endpoint=endpoint,
                program=program_name() if program is None else program,
                connect_timeout_s=connect_timeout_s,
                reconnect_timeout_s=reconnect_timeout_s,
                timeout_s=timeout_s,
                retry_busy=retry_busy,
                key_file=key_file,
                server_key=server_key,
            )
        )

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- drawing --------------------------------------------------------------------------------

    async def generate(
        self,
        model: str,
        prompt: str | list[str] | None = None,
        *,
        seed: int | None = None,
        on_progress: Callable[[Progress], Awaitable[object] | object] | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        job_id: str | None = None,
        queue_timeout_s: float | None = None,
        run_timeout_s: float | None = None,
        detached: bool = False,
        keep_alive_s: float | None = None,
        preview_every_s: float | None = None,
        adapters: Sequence[Mapping[str, Any]] = (),
        **arguments: Any,
    ) -> Result:
        """Draw, and wait for the result; arguments and errors as for `Client.generate`.

            red, blue = await asyncio.gather(
                client.generate("shapes", "a red circle on a white background", seed=7),
                client.generate("shapes", "a blue square on a white background", seed=7),
            )

        `on_progress` may be a plain function or a coroutine function, which is awaited. When the
        task is cancelled, so is the job.
        """
        wait = await self._begin("the result", self._core.limit_s(timeout_s))
        job = await self._submit(
            wait,
            model,
            prompt,
            arguments,
            seed=seed,
            priority=priority,
            job=job_id,
            queue_timeout_s=queue_timeout_s,
            run_timeout_s=run_timeout_s,
            detached=detached,
            keep_alive_s=keep_alive_s,
            preview_every_s=preview_every_s,
            adapters=adapters,
        )
        record, seen = job._record, 0
        with self._cancelling(record):
            while on_progress is not None:
                fresh, seen = await self._events(record, seen, wait)
                for event in fresh:
                    outcome = on_progress(progress_of(event, record))
                    if isinstance(outcome, Awaitable):
                        await outcome
                if record.ended and seen == record.events_total:
                    break
            await self._wait(record, lambda: record.ended, wait)
        return self._hand_over(record)

    async def submit(
        self,
        model: str,
        prompt: str | list[str] | None = None,
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        job_id: str | None = None,
        queue_timeout_s: float | None = None,
        run_timeout_s: float | None = None,
        detached: bool = False,
        keep_alive_s: float | None = None,
        preview_every_s: float | None = None,
        adapters: Sequence[Mapping[str, Any]] = (),
        **arguments: Any,
    ) -> AsyncJob:
        """Queue a job and return at once; arguments and errors as for `Client.submit`.

        job = await client.submit("shapes", "a red circle on a white background")
        async for progress in job.progress():
            print(progress.step, progress.steps)
        result = await job
        """
        return await self._submit(
            await self._begin("the answer to submit", self._core.limit_s(timeout_s)),
            model,
            prompt,
            arguments,
            seed=seed,
            priority=priority,
            job=job_id,
            queue_timeout_s=queue_timeout_s,
            run_timeout_s=run_timeout_s,
            detached=detached,
            keep_alive_s=keep_alive_s,
            preview_every_s=preview_every_s,
            adapters=adapters,
        )

    async def job(self, job_id: str, *, timeout_s: float | None = None) -> AsyncJob:
        """Come back to a job by its id, also to one that another process submitted.

        Raises `UnknownJob` where the daemon has none of this user, or its result was taken.
        """
        return await self._find(job_id, timeout_s)

    async def cancel(self, job_id: str, *, timeout_s: float | None = None) -> JobState:
        """End a job by its id; returns the state it has now. Raises `UnknownJob`."""
        result = await self._ask(messages.Cancel, timeout_s, QUICK_TIMEOUT_S, job=job_id)
        return convert(result, JobInfo).state

    # --- questions and administration -----------------------------------------------------------

    async def ping(self, *, timeout_s: float | None = None) -> float:
        """Ask for an empty answer; returns the seconds until it came."""
        await self.connect()
        started = time.perf_counter()
        await self._ask(messages.Ping, timeout_s, QUICK_TIMEOUT_S)
        return time.perf_counter() - started

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the daemon holds and does: its devices, store, models, queue, jobs, workers."""
        return await self._ask(messages.Stats, timeout_s, QUICK_TIMEOUT_S)

    async def jobs(self, *, timeout_s: float | None = None) -> list[JobInfo]:
        """The jobs that this user may see, in the daemon's order."""
        return rows_of_jobs(await self._ask(messages.Jobs, timeout_s, QUICK_TIMEOUT_S))

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The hosted models, and where the bytes of their components are."""
        return rows_of_models(await self._ask(messages.Models, timeout_s, QUICK_TIMEOUT_S))

    async def load(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> ModelInfo:
        """Host a model under a name and wait until it is loaded, as `Client.load` does."""
        fields = load_fields(name, source, options)
        return convert(await self._ask(messages.Load, timeout_s, None, **fields), ModelInfo)

    async def plan(
        self,
        source: str | os.PathLike[str],
        *,
        device_budget: str | int | None = None,
        host_budget: str | int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Forecast:
        """What hosting a source would take and cost, as `Client.plan` says it."""
        fields = plan_fields(source, options, device_budget, host_budget)
        return convert(await self._ask(messages.Plan, timeout_s, None, **fields), Forecast)

    async def unload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Take a model out of memory; returns when the memory is free. Raises `UnknownModel`."""
        await self._ask(messages.Unload, timeout_s, None, name=name)

    async def pin(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Load a model and keep it in memory until `unpin` or `unload`; for administrators."""
        return convert(await self._ask(messages.Pin, timeout_s, None, name=name), ModelInfo)

    async def unpin(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Let a pinned model go as any other; for administrators."""
        result = await self._ask(messages.Unpin, timeout_s, QUICK_TIMEOUT_S, name=name)
        return convert(result, ModelInfo)

    async def drain(self, *, timeout_s: float | None = None) -> None:
        """Let the daemon take no new jobs; returns when the last one ended; for administrators."""
        await self._ask(messages.Drain, timeout_s, None)
