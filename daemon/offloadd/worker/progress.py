"""Tells the control plane how far a job is, at most so often, and stops a cancelled job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload_protocol.records import JobState
from offloadd.channel.framing import Frame
from offloadd.channel.messages import JobProgressed
from offloadd.hosting.running.previews import rough_picture

MIN_INTERVAL_S = 0.05
MIN_PREVIEW_INTERVAL_S = 0.1


class JobProgress:
    """The progress of one job; every method raises what `look` raises once the job is to stop."""

    def __init__(
        self,
        job: str,
        send: Callable[[JobProgressed, Sequence[Frame]], None],
        look: Callable[[], None],
        clock: Callable[[], float],
        preview_every_s: float | None = None,
    ) -> None:
        self._job = job
        self._send = send
        self._look = look
        self._clock = clock
        self._sent_at = -MIN_INTERVAL_S
        self._sent_state: JobState | None = None
        self._preview_every_s = max(preview_every_s or 0.0, MIN_PREVIEW_INTERVAL_S)
        self._shown_at = clock()
        self._step = self._steps = 0

    def loading(self, done: int, total: int) -> None:
        """`done` of `total` components are loaded."""
        self._tell("loading", done, total)

    def running(self, step: int, steps: int) -> None:
        """The pipeline's progress bar stands at `step` of `steps` (0 while unknown)."""
        self._tell("running", step, steps)

    def shown(self, latents: torch.Tensor) -> None:
        """The pipeline shows its latents: pass on a rough picture of them, if one is due."""
        now = self._clock()
        if now - self._shown_at < self._preview_every_s:
            return
        self._shown_at = now
        picture = rough_picture(latents)
        if picture is not None:
            height, width = picture.shape
            preview = {"$image": 0, "mode": "L", "size": [width, height]}
            news = JobProgressed(
                job=self._job,
                state="running",
                step=self._step,
                steps=self._steps,
                preview=preview,
            )
            self._send(news, [picture.tobytes()])

    def _tell(self, state: JobState, step: int, steps: int) -> None:
        self._look()
        self._step, self._steps = step, steps
        now = self._clock()
        is_edge = state != self._sent_state or step in (0, steps)
        if is_edge or now - self._sent_at >= MIN_INTERVAL_S:
            self._sent_at, self._sent_state = now, state
            self._send(JobProgressed(job=self._job, state=state, step=step, steps=steps), ())
