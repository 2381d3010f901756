"""A job as an asyncio program holds it; awaiting it gives its result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any

from offload_client.records import JobRecord
from offload_client.results import Progress, Result, progress_of
from offload_protocol.records import FINAL_STATES, JobState

if TYPE_CHECKING:
    from offload_client.aio_waiting import Looping


class AsyncJob:
    """One request to draw, as `AsyncClient.submit` and `AsyncClient.job` give it.

        job = await client.submit("shapes", "a red circle on a white background")
        result = await job

    The job does not depend on this object: it runs on when the object is gone, and
    `await client.job(id)` comes back to it until its result was taken.
    """

    def __init__(self, client: Looping, record: JobRecord) -> None:
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
        """Where the job is, as far as has been heard."""
        return self._record.state

    async def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the result, for `timeout_s` seconds at most (default: the client's limit).

        Raises the error that the job ended with, `TimedOut` (the job runs on), or `Unreachable`
        where the daemon is gone and does not come back within the client's `reconnect_timeout_s`.
        """
        return await self._client._result(self._record, timeout_s)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.result().__await__()

    async def events(self, timeout_s: float | None = None) -> AsyncIterator[Progress]:
        """Each change of the job, the last of which has a final state; waits between them.

        Begins with the earliest change that is still remembered. A reader that is 256 behind loses
        the oldest. `timeout_s` is the whole wait; raises as `result` does, but not the job's error.
        """
        seen = 0
        wait = self._client._core.wait(
            f"the next event of job {self.id}", timeout_s, job_known=True
        )
        while True:
            fresh, seen = await self._client._events(self._record, seen, wait)
            for event in fresh:
                yield progress_of(event, self._record)
            if self._record.ended and seen == self._record.events_total:
                return

    async def progress(self, timeout_s: float | None = None) -> AsyncIterator[Progress]:
        """Like `events`, without the last: ends as soon as the job does."""
        async for event in self.events(timeout_s):
            if event.state not in FINAL_STATES:
                yield event

    async def cancel(self) -> JobState:
        """End the job, whatever its state; returns the state it has now.

        `result` then raises `Cancelled`. A job that has already ended stays as it is.
        """
        return await self._client._cancel(self._record)

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id} on {self.model!r}: {self._record.state}>"
