"""Tells the clients that are attached to a job how far it is and how it ended."""

from __future__ import annotations

from offload_protocol.messages import Progress
from offloadd.control.jobs import Job
from offloadd.control.sessions import Sessions


class Telling:
    """The `Watchers` of all jobs."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def job_moved(self, job: Job) -> None:
        """Its state, step or position changed."""
        progress = Progress(
            job=job.request.job,
            state=job.state,
            position=job.position,
            starts_in_s=job.starts_in_s if job.state == "queued" else None,
            step=job.step,
            steps=job.steps,
        )
        for client in job.watchers:
            self._sessions.push_progress(client, job.key, progress)

    def job_finished(self, job: Job) -> None:
        """It has ended; its end is in the results."""
        for client in job.watchers:
            self._sessions.push_finished(client, job.key)
