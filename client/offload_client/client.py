"""The client for programs without an event loop: plain calls that wait for their answers.

It starts no thread; threads may share it. Its twin for asyncio is `offload_client.aio`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from offload_client.blocking import Blocking
from offload_client.core import (
    QUICK_TIMEOUT_S,
    Settings,
    load_fields,
    plan_fields,
    program_name,
    rows_of_jobs,
    rows_of_models,
)
from offload_client.job import Job
from offload_client.results import Progress, Result, progress_of
from offload_protocol import messages
from offload_protocol.codec import convert
from offload_protocol.records import Forecast, JobInfo, JobState, ModelInfo


class Client(Blocking):
    """A connection to the daemon, opened by the first call or by `with`.

        from offload_client import Client

        with Client() as client:
            client.generate("shapes", "a red circle on a white background", seed=7).image.save(
                "red.png"
            )

    Args:
        endpoint: `ipc:///path/to/socket` or `tcp://HOST:PORT`. By default `OFFLOADD_ENDPOINT`, else
            the user's socket, else the system's.
        program: the name shown to people who look at the queue, and by which the daemon shares the
            device fairly among the programs of one user; by default the name of the script.
        connect_timeout_s: how long to look for a daemon before `Unreachable` is raised.
        timeout_s: the limit of every call that is not given its own. Without one, questions about
            the daemon's state are given 10 s, and work that takes its time has no limit.
        reconnect_timeout_s: how long work under way outlives the loss of the daemon: a daemon that
            is back within this time goes on with the same jobs, and the caller notices nothing.
        retry_busy: whether to wait and ask again, as the daemon says, when its queue is full.
        key_file: for `tcp://`, this client's own key, as `offloadctl keygen` makes it. By default
            `OFFLOADD_KEY_FILE`, else `~/.config/offloadd/client.key`.
        server_key: for `tcp://`, the daemon's public key, or the file that holds it. By default
            `OFFLOADD_SERVER_KEY`, else `~/.config/offloadd/server.pub`.

    Every error is an `OffloadError`. Threads may share a client; a forked child makes its own.
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

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- drawing --------------------------------------------------------------------------------

    def generate(
        self,
        model: str,
        prompt: str | list[str] | None = None,
        *,
        seed: int | None = None,
        on_progress: Callable[[Progress], object] | None = None,
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
        """Draw, and wait for the result.

            result = client.generate(
                "shapes",
                "a red circle on a white background",
                seed=7,
                num_inference_steps=20,
                on_progress=lambda p: print(f"{p.state} {p.step}/{p.steps}"),
            )
            result.image.save("red.png")   # a PIL image; all of them in result.images
            print(result.seed, result.timings.running_s, result.peak_device_bytes)

        Args:
            model: the name of a hosted model; `client.models()` lists them.
            prompt: what to draw; a list draws one picture for each. None for a model without one.
            seed: the same seed gives the same picture. Without one the daemon draws a seed, which
                `result.seed` tells.
            on_progress: called in this thread with each `Progress`. An error that it raises ends
                the job and comes out here.
            timeout_s: for everything together; when it is over, the job is cancelled.
            priority: higher goes first.
            job_id: a name of your own for the job. Saying the same id with the same request again,
                from any process, gives the same job instead of a second one.
            queue_timeout_s: give up when the job has not begun after this time.
            run_timeout_s: give up when it has run for this time.
            detached: the job goes on when this program has gone. Otherwise it is cancelled then,
                2 s after the connection ended.
            keep_alive_s: how long the model stays in memory after this job; below 0 for ever. By
                default as the model or the daemon is set.
            preview_every_s: give `on_progress` a rough grey picture of how far it is (`preview`),
                at most so often. Pipelines without `callback_on_step_end` give none.
            adapters: adapters of the model that colour this picture alone, in their order, such as
                `[{"name": "style", "weight": 0.8}]`; `weight` is 1 unless given.
            arguments: any argument of the hosted pipeline's call, such as `height`, `width`,
                `guidance_scale`, `negative_prompt`, `image`. Numbers, texts, lists, maps, numpy
                arrays and PIL images can be sent.

        Raises:
            UnknownModel, InvalidRequest, TooLarge: the request cannot be served as it was said.
            Busy: the queue is full (only with `retry_busy=False`, or when `timeout_s` is too short
                for the wait that the daemon asks for).
            Cancelled, DeadlineExceeded, OutOfMemory, WorkerCrashed, ...: how the job ended.
            TimedOut: `timeout_s` is over.
            Unreachable: there is no daemon, or it went away and did not come back.

        An interrupt (Ctrl-C) cancels the job, then goes on as `KeyboardInterrupt`.
        """
        wait = self._begin("the result", self._core.limit_s(timeout_s))
        record, call = self._say(
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
        seen = 0
        with self._cancelling(record):
            if call.record is None:
                # The same id was said before: the end of that job is the end of this one only if it
                # is the same request. Otherwise a refusal ends the job.
                self._pump.wait(lambda: call.done, wait)
                call.answer()
            while on_progress is not None:
                fresh, seen = self._events(record, seen, wait)
                for event in fresh:
                    on_progress(progress_of(event, record))
                if record.ended and seen == record.events_total:
                    break
            self._pump.wait(lambda: record.ended, wait)
        return self._hand_over(record)

    def submit(
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
    ) -> Job:
        """Queue a job and return at once; arguments and errors as for `generate`.

            jobs = [client.submit("shapes", prompt) for prompt in prompts]
            pictures = [job.result().image for job in jobs]

        `timeout_s` is for queueing it alone: until the daemon has accepted it.
        """
        return self._submit(
            self._begin("the answer to submit", self._core.limit_s(timeout_s)),
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

    def job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Come back to a job by its id, also to one that another process submitted.

        Raises `UnknownJob` where the daemon has none of this user, or its result was taken.
        """
        return self._find(job_id, timeout_s)

    def cancel(self, job_id: str, *, timeout_s: float | None = None) -> JobState:
        """End a job by its id; returns the state it has now. Raises `UnknownJob`."""
        result = self._ask(messages.Cancel, timeout_s, QUICK_TIMEOUT_S, job=job_id)
        return convert(result, JobInfo).state

    # --- questions and administration -----------------------------------------------------------

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Ask for an empty answer; returns the seconds until it came."""
        self.connect()
        started = time.perf_counter()
        self._ask(messages.Ping, timeout_s, QUICK_TIMEOUT_S)
        return time.perf_counter() - started

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the daemon holds and does: its devices, store, models, queue, jobs, workers."""
        return self._ask(messages.Stats, timeout_s, QUICK_TIMEOUT_S)

    def jobs(self, *, timeout_s: float | None = None) -> list[JobInfo]:
        """The jobs that this user may see, in the daemon's order."""
        return rows_of_jobs(self._ask(messages.Jobs, timeout_s, QUICK_TIMEOUT_S))

    def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The hosted models, and where the bytes of their components are."""
        return rows_of_models(self._ask(messages.Models, timeout_s, QUICK_TIMEOUT_S))

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> ModelInfo:
        """Host a model under a name and wait until it is loaded.

            client.load("sdxl", "/models/sdxl-base", dtype="float16", offload="group")

        `source` is a directory in the diffusers layout, a hub id, or a single-file checkpoint with
        the directory of its configurations as `config`; without it, a model that is already known
        is loaded now. `options` are the keys of a `[[models]]` entry in the daemon's
        configuration. Raises `ModelLoadFailed`, which names what is wrong with the source,
        `InvalidRequest` for an option, and `Unauthorized` without the administrator's role.
        """
        fields = load_fields(name, source, options)
        return convert(self._ask(messages.Load, timeout_s, None, **fields), ModelInfo)

    def plan(
        self,
        source: str | os.PathLike[str],
        *,
        device_budget: str | int | None = None,
        host_budget: str | int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Forecast:
        """What hosting a source would take and cost, from its files' headers; loads nothing.

            client.plan("/models/sdxl-base", device_budget="8GiB").best_budget_bytes

        `source` and `options` are as in `load`, or `source` is the name of a hosted model. Budgets
        are sizes; without them, what the daemon has counts. Raises what `load` raises.
        """
        fields = plan_fields(source, options, device_budget, host_budget)
        return convert(self._ask(messages.Plan, timeout_s, None, **fields), Forecast)

    def unload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Take a model out of memory; returns when the memory is free. Raises `UnknownModel`."""
        self._ask(messages.Unload, timeout_s, None, name=name)

    def pin(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Load a model and keep it in memory until `unpin` or `unload`; for administrators."""
        return convert(self._ask(messages.Pin, timeout_s, None, name=name), ModelInfo)

    def unpin(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """Let a pinned model go as any other; for administrators."""
        return convert(self._ask(messages.Unpin, timeout_s, QUICK_TIMEOUT_S, name=name), ModelInfo)

    def drain(self, *, timeout_s: float | None = None) -> None:
        """Let the daemon take no new jobs; returns when the last one ended; for administrators."""
        self._ask(messages.Drain, timeout_s, None)
