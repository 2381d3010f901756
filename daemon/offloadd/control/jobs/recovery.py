"""Makes the journal's jobs and models known to a daemon that has just started."""

from __future__ import annotations

import logging

from offload_protocol.errors import StorageFailed
from offloadd.control.clients.leases import Leases
from offloadd.control.clocks import Clocks
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.jobs.endings import Endings
from offloadd.control.jobs.jobs import Fingerprint, Job, Owner, job_key
from offloadd.control.journal.reading import Accepted, Recovered

_log = logging.getLogger(__name__)


def recover(
    recovered: Recovered,
    dispatcher: Dispatcher,
    endings: Endings,
    leases: Leases,
    lease_s: float,
    clocks: Clocks,
) -> None:
    """Queue what had not ended, remember what had, and renew the lease of every client.

    A job whose arguments are lost ends with `storage_failed`.
    """
    for one in sorted(recovered.ended, key=lambda one: one.ended_at):
        endings.recover(_job(one.accepted, (), clocks), one)
    for waiting in recovered.open:
        frames = waiting.frames if not isinstance(waiting.frames, StorageFailed) else ()
        job = _job(waiting.accepted, frames, clocks)
        if not job.request.detached:
            leases.renew(job.owner.client, clocks.monotonic_s() + lease_s)
        dispatcher.restore(job)
        if isinstance(waiting.frames, StorageFailed):
            dispatcher.cancel(job, waiting.frames)
    if recovered.open or recovered.ended:
        _log.info(
            "the journal had %d jobs that had not ended, and the ends of %d",
            len(recovered.open),
            len(recovered.ended),
        )


def _job(accepted: Accepted, frames: tuple[memoryview, ...], clocks: Clocks) -> Job:
    age_s = max(clocks.wall_s() - accepted.submitted_at, 0.0)
    return Job(
        key=job_key(accepted.user, accepted.request.job),
        request=accepted.request,
        owner=Owner(accepted.user, accepted.client, accepted.program),
        fingerprint=Fingerprint(accepted.digest, accepted.size_bytes),
        frames=frames,
        submitted_at=accepted.submitted_at,
        submitted_s=clocks.monotonic_s() - age_s,
        seed=accepted.seed,
        number=accepted.number,
        strikes=accepted.strikes,
        kills=accepted.kills,
        is_alone=accepted.is_alone,
        watchers={accepted.client},
    )
