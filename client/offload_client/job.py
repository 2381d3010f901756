"""A job as a program holds it: its state, its progress, its result, its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload_client.records import JobRecord
from offload_client.results import Progress, Result, progress_of
from offload_protocol.records import FINAL_STATES, JobState

if TYPE_CHECKING:
    from offload_client.blocking import Blocking


class Job:
    """One request to draw, as `Client.submit` and `Client.job` give it.

    Safe from threads. The job does not depend on this object, but on the client's connection,
    unless it was submitted with `detached`. `client.job(id)` comes back to it, from another process
    too, until its result was taken.
    """

    def __init__(self, client: Blocking, record: JobRecord) -> None:
        self._client = client
        self._record = record

    @property
    def id(self) -> str:
        """The job's name; the same for as long as the daemon knows it."""
        return self._record.id

    @property
    def model(self) -> str:
        """The model that it runs on."""
        return self._record.model

    @property
    def state(self) -> JobState:
        """Where the job is, as far as has been heard; does not wait."""
        self._client._hear()
        return self._record.state

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the result, for `timeout_s` seconds at most (default: the client's limit).

        Raises the error that the job ended with, `TimedOut` (the job runs on), or `Unreachable`
        where the daemon is gone and does not come back within the client's `reconnect_timeout_s`.
        """
        return self._client._result(self._record, timeout_s)

    def events(self, timeout_s: float | None = None) -> Iterator[Progress]:
        """Each change of the job, the last of which has a final state; waits between them.

        Begins with the earliest change that is still remembered. A reader that is 256 behind loses
        the oldest. `timeout_s` is the whole wait; raises as `result` does, but not the job's error.
        """
        seen = 0
        wait = self._client._core.wait(
            f"the next event of job {self.id}", timeout_s, job_known=True
        )
        while True:
            fresh, seen = self._client._events(self._record, seen, wait)
            yield from (progress_of(event, self._record) for event in fresh)
            if self._record.ended and seen == self._record.events_total:
                return

    def progress(self, timeout_s: float | None = None) -> Iterator[Progress]:
        """Like `events`, without the last: ends as soon as the job does."""
        return (event for event in self.events(timeout_s) if event.state not in FINAL_STATES)

    def cancel(self) -> JobState:
        """End the job, whatever its state; returns the state it has now.

        `result` then raises `Cancelled`. A job that has already ended stays as it is.
        """
        return self._client._cancel(self._record)

    def __repr__(self) -> str:
        return f"<Job {self.id} on {self.model!r}: {self._record.state}>"
