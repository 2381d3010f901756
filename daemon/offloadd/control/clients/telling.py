"""Tells the clients that are attached to a job how far it is and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from offload_protocol.messages import Progress
from offloadd.control.clients.sessions import Sessions
from offloadd.control.jobs.jobs import Job
from offloadd.control.journal.frames import Frame


class Telling:
    """The `Watchers` of all jobs."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def job_moved(self, job: Job) -> None:
        """Its state, step or position changed."""
        progress = _progress(job)
        for client in job.watchers:
            self._sessions.push_progress(client, job.key, progress)

    def job_shown(self, job: Job, preview: dict[str, Any], frames: Sequence[Frame]) -> None:
        """There is a picture of how far it is; who reads slowly gets the words alone."""
        progress = _progress(job)
        shown = msgspec.structs.replace(progress, preview=preview)
        for client in job.watchers:
            if not self._sessions.push_preview(client, shown, frames):
                self._sessions.push_progress(client, job.key, progress)

    def job_finished(self, job: Job) -> None:
        """It has ended; its end is in the results."""
        for client in job.watchers:
            self._sessions.push_finished(client, job.key)


def _progress(job: Job) -> Progress:
    return Progress(
        job=job.request.job,
        state=job.state,
        position=job.position,
        starts_in_s=job.starts_in_s if job.state == "queued" else None,
        step=job.step,
        steps=job.steps,
    )
