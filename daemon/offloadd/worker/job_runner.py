"""Runs one job from its arrival to its end, in a thread that is its own for as long.

Promises: each job is answered with its end exactly once; while its model is loaded, and while it is
parked, others have the device; what is left after its end is what was there before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from offload_protocol import values
from offload_protocol.records import ErrorInfo, Outcome, Timings
from offloadd.channel.framing import Frame, WorkerEnd
from offloadd.channel.messages import JobEnded, ModelFailed, ModelLoaded, ModelUnloaded, RunJob
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.noop import NoopModel
from offloadd.hosting.running.arguments import prepare_call
from offloadd.worker.attempts import Attempts
from offloadd.worker.device import Device
from offloadd.worker.models import Models
from offloadd.worker.peak import PeakMeter
from offloadd.worker.progress import JobProgress
from offloadd.worker.sweeps import Hold, RoomHold, Sweeps
from offloadd.worker.turns import Aside, JobTurn, Turns

Model = HostedModel | NoopModel

BRIEF_S = 0.001
"""A job on a model whose latest one took less is likely to be over in a moment."""

_log = logging.getLogger(__name__)


class JobRunner:
    """What all jobs of a worker share."""

    def __init__(
        self,
        channel: WorkerEnd,
        device: Device,
        models: Models,
        turns: Turns,
        attempts: Attempts,
    ) -> None:
        self._channel = channel
        self._device = device
        self._models = models
        self._turns = turns
        self._attempts = attempts
        self._sweeps = Sweeps(turns.baton)
        self._running_s: dict[str, float] = {}
        """What the latest job on each model took."""

    def run(
        self,
        job: RunJob,
        frames: Sequence[Frame],
        turn: JobTurn,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a job to its end; `let_go` is called first where that may take its time."""
        if job.awaits_turn or self._running_s.get(job.model, BRIEF_S) >= BRIEF_S:
            let_go()
        progress = JobProgress(
            job.job, self._channel.send, turn.look, time.monotonic, job.preview_every_s
        )
        start_s = time.monotonic()
        used = self._attempts.make(
            lambda: self._use(job, progress.loading, turn), has_baton=False, loads=True
        )
        if used.result is None:
            assert used.error is not None
            self._fail_loading(job, used.error)
            return
        model, is_fresh = used.result
        loading_s = time.monotonic() - start_s if is_fresh else 0.0
        try:
            error, done = self._take_turn(job, frames, turn, progress, model, loading_s)
        finally:
            self._models.leave(job.model)
        del model, used
        if error is not None and error.code == "storage_failed":
            self._drop_model(job.model)
        self._turns.end(job.job)
        if done is None:
            assert error is not None
            _log.warning("job=%s ended code=%s", job.job, error.code)
            told = JobEnded(job=job.job, error=error, is_better_shared=turn.is_better_shared)
            self._channel.send(told)
        else:
            outcome, packed = done
            self._running_s[job.model] = outcome.timings.running_s
            told = JobEnded(
                job=job.job,
                outcome=outcome,
                is_better_shared=turn.is_better_shared,
                activations_bytes=turn.activations_bytes,
            )
            self._channel.send(told, packed)

    def _use(
        self, job: RunJob, on_component: Callable[[int, int], None], turn: JobTurn
    ) -> tuple[Model, bool]:
        turn.look()
        start_s = time.monotonic()
        model, is_fresh = self._models.use(job.model, on_component)
        if is_fresh:
            self._channel.send(loaded_message(job.model, model, time.monotonic() - start_s))
        return model, is_fresh

    def _take_turn(
        self,
        job: RunJob,
        frames: Sequence[Frame],
        turn: JobTurn,
        progress: JobProgress,
        model: Model,
        loading_s: float,
    ) -> tuple[ErrorInfo | None, tuple[Outcome, list[values.Frame]] | None]:
        hold = self._hold(job, model)
        begun = self._attempts.make(partial(_begin, job, turn, hold), has_baton=False)
        if begun.error is not None:
            return begun.error, None
        try:
            drawn = self._attempts.make_twice(
                lambda: self._draw(job, frames, turn, progress, model, loading_s)
            )
        finally:
            turn.is_better_shared = model.is_better_shared
            turn.give_back()
        return drawn.error, drawn.result

    def _hold(self, job: RunJob, model: Model) -> Hold | None:
        """How the job has the device: with others on its model where they share what streams."""
        if isinstance(model, NoopModel) or model.sweep_room is None:
            return None
        return RoomHold(
            self._sweeps,
            model.sweep_room,
            job.job,
            self._device.torch_device,
            wear=partial(model.wear, job.adapters),
            is_alone=job.is_alone,
            settings=model.own_settings(job.arguments),
        )

    def _draw(
        self,
        job: RunJob,
        frames: Sequence[Frame],
        turn: JobTurn,
        progress: JobProgress,
        model: Model,
        loading_s: float,
    ) -> tuple[Outcome, list[values.Frame]]:
        description = model.description
        call = prepare_call(
            values.unpack(job.arguments, [memoryview(frame) for frame in frames]),
            description.parameters,
            job.seed,
            self._device.torch_device,
            description.dtype,
        )
        clock = _OwnTurns(PeakMeter(self._device.torch_device))
        outputs = model.run(
            call,
            progress.running,
            turn.look,
            lambda aside: turn.at_border(_Measured(aside, clock), model),
            progress.shown if job.preview_every_s is not None else None,
            job.adapters,
            job.owner,
        )
        turn.activations_bytes = clock.activations_bytes()
        packed: list[values.Frame] = []
        outcome = Outcome(
            outputs=values.pack(outputs, packed),
            seeds=call.seeds,
            timings=Timings(loading_s=loading_s, running_s=clock.running_s()),
            peak_device_bytes=clock.peak_bytes(),
            moved_bytes=model.moved_bytes,
        )
        # The control plane tells of each job's end; it need not read it from us as well.
        _log.debug("job=%s model=%s drawn running_s=%.2f", job.job, job.model, clock.running_s())
        return outcome, packed

    def _fail_loading(self, job: RunJob, error: ErrorInfo) -> None:
        _log.warning("job=%s model=%s not loaded: %s", job.job, job.model, error.message)
        self._turns.end(job.job)
        if error.code != "cancelled":
            self._channel.send(ModelFailed(name=job.model, error=error))
        self._channel.send(JobEnded(job=job.job, error=error))

    def _drop_model(self, name: str) -> None:
        # What rests on disk is gone or unreadable: the next job loads the model anew.
        if self._models.is_used(name):
            return
        dropped = self._attempts.make(lambda: self._models.unload(name), has_baton=False)
        if dropped.error is None:
            self._channel.send(ModelUnloaded(name=name))
        else:
            self._channel.send(ModelFailed(name=name, error=dropped.error))


def loaded_message(name: str, model: Model, loading_s: float) -> ModelLoaded:
    """What is said of a model that has just been loaded."""
    _log.info("loaded model=%s offload=%s loading_s=%.2f", name, model.offload, loading_s)
    return ModelLoaded(
        name=name, offload=model.offload, components=model.components(), loading_s=loading_s
    )


def _begin(job: RunJob, turn: JobTurn, hold: Hold | None) -> None:
    if job.awaits_turn:
        turn.await_resume()
    turn.take(hold)


class _OwnTurns:
    """Adds up what was measured in one job's own turns."""

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter
        self._peak_bytes = 0
        self._earlier_s = 0.0
        self._since_s = time.monotonic()

    def running_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._since_s

    def peak_bytes(self) -> int:
        return max(self._peak_bytes, self._meter.peak_bytes())

    def activations_bytes(self) -> int:
        held_bytes = self._meter.held_bytes()
        return max(self.peak_bytes() - held_bytes, 0) if held_bytes else 0

    def stop(self) -> None:
        self._earlier_s, self._peak_bytes = self.running_s(), self.peak_bytes()

    def go_on(self) -> None:
        self._since_s = time.monotonic()
        self._meter.restart()


class _Measured:
    """A job put aside, whose measuring stands still meanwhile."""

    def __init__(self, aside: Aside, clock: _OwnTurns) -> None:
        self._aside = aside
        self._clock = clock

    def leave(self) -> int | None:
        held_bytes = self._aside.leave()
        if held_bytes is not None:
            self._clock.stop()
        return held_bytes

    def come_back(self) -> None:
        self._clock.go_on()
        self._aside.come_back()
