"""Tells the control plane how far a job is, at most so often, and stops a cancelled job."""

from __future__ import annotations

from collections.abc import Callable

from offload_protocol.messages import JobState
from offloadd.channel.messages import JobProgressed

MIN_INTERVAL_S = 0.05


class JobProgress:
    """The progress of one job; every method raises what `look` raises once the job is to stop."""

    def __init__(
        self,
        job: str,
        send: Callable[[JobProgressed], None],
        look: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._send = send
        self._look = look
        self._clock = clock
        self._sent_at = -MIN_INTERVAL_S
        self._sent_state: JobState | None = None

    def loading(self, done: int, total: int) -> None:
        """`done` of `total` components are loaded."""
        self._tell("loading", done, total)

    def running(self, step: int, steps: int) -> None:
        """The pipeline's progress bar stands at `step` of `steps` (0 while unknown)."""
        self._tell("running", step, steps)

    def _tell(self, state: JobState, step: int, steps: int) -> None:
        self._look()
        now = self._clock()
        is_edge = state != self._sent_state or step in (0, steps)
        if is_edge or now - self._sent_at >= MIN_INTERVAL_S:
            self._sent_at, self._sent_state = now, state
            self._send(JobProgressed(job=self._job, state=state, step=step, steps=steps))
