"""Jobs as the control plane knows them, from their acceptance to their tombstone.

A job's id is its client's; ids of different users never meet, so the key holds the user as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from offload_protocol import codec
from offload_protocol.errors import InvalidRequest, OffloadError
from offload_protocol.messages import AdapterChoice, Submit
from offload_protocol.records import FINAL_STATES, JobInfo, JobState, Timings
from offloadd.channel.calls import may_scale_adapters

MAX_ID_CHARS = 200
MAX_TOMBSTONES = 5_000
"""Ended jobs of one user that are remembered; the oldest whose result was taken goes first."""

MAX_LISTED = 1_000
"""Jobs in one list; the newest are listed."""


Wears = tuple[AdapterChoice, ...] | None
"""The adapters that a job's model wears; None for a job that shares the device with no other."""


class Owner(msgspec.Struct, frozen=True):
    """Who a job belongs to: a user, one of that user's clients, and the program's own name."""

    user: str
    client: str
    program: str = ""


class Fingerprint(msgspec.Struct, frozen=True):
    """What tells two requests apart, and the bytes that a request holds."""

    digest: bytes
    size_bytes: int


@dataclass(slots=True)
class Job:
    """One request and what became of it. Times with `_s` are the monotonic clock's."""

    key: str
    request: Submit
    owner: Owner
    fingerprint: Fingerprint
    frames: tuple[memoryview, ...]
    submitted_at: float
    submitted_s: float
    seed: int
    number: int = 0
    """Its row in the journal."""
    strikes: int = 0
    """How often the worker died of itself, and of nothing else than this job."""
    kills: int = 0
    """How often the worker died beside it from outside, or perhaps of something else."""
    is_alone: bool = False
    """No other job and no load goes on beside it: a worker died while one did."""
    has_shared: bool = False
    """Another job went on beside it, so that what was measured is not its own."""
    state: JobState = "queued"
    position: int | None = None
    starts_in_s: float | None = None
    step: int = 0
    steps: int = 0
    started_s: float | None = None
    running_since_s: float | None = None
    turn_since_s: float | None = None
    """Since when it has the device, if it has."""
    used_s: float = 0.0
    """How long it had the device in earlier turns."""
    charged_s: float = 0.0
    """Its part of that, where it shared the device with others."""
    ended_s: float | None = None
    checked: bool = False
    """Its arguments were compared with what the model takes."""
    stopping: OffloadError | None = None
    """Why the worker was told to end it; what the client is told if that is how it ends."""
    watchers: set[str] = field(default_factory=set)
    """Clients that are attached to it: they are told of its progress and its end."""
    is_written: bool = False
    """The journal holds it, so that it counts as accepted."""
    is_void: bool = False
    """The journal could not take it: whatever becomes of it, nobody is told."""
    end_is_written: bool = False
    """Its watchers have been told of its end."""
    awaiting: list[Callable[[OffloadError | None], None]] = field(default_factory=list)

    @property
    def wears(self) -> Wears:
        """What those wear who may have the device together with it."""
        request = self.request
        if self.is_alone:
            return None
        if request.adapters and may_scale_adapters(request.arguments):
            return None
        return tuple(request.adapters)

    @property
    def is_final(self) -> bool:
        """It has ended."""
        return self.state in FINAL_STATES

    def when_written(self, call: Callable[[OffloadError | None], None]) -> None:
        """Call when the journal holds the job, or at once, or with why it does not."""
        if self.is_written:
            call(None)
        else:
            self.awaiting.append(call)

    def written(self, error: OffloadError | None) -> None:
        """The journal holds the job, or cannot."""
        self.is_written, self.is_void = error is None, error is not None
        awaiting, self.awaiting = self.awaiting, []
        for call in awaiting:
            call(error)

    def put_back(self) -> None:
        """It is to run once more, from the beginning."""
        self.state, self.step, self.steps = "queued", 0, 0
        self.started_s = self.running_since_s = self.turn_since_s = None
        self.used_s = self.charged_s = 0.0
        self.has_shared = False

    def device_s(self, now_s: float) -> float:
        """How long it has had the device."""
        return self.used_s + (0.0 if self.turn_since_s is None else now_s - self.turn_since_s)

    def release_request(self) -> None:
        """Let go of what was asked; the fingerprint stays to know it by."""
        self.frames = ()
        self.request = msgspec.structs.replace(self.request, arguments={})

    def timings(self, now_s: float) -> Timings:
        """How long it has waited, loaded, computed and given way so far."""
        now_s = self.ended_s if self.ended_s is not None else now_s
        started_s = self.started_s if self.started_s is not None else now_s
        first_s = self.running_since_s if self.running_since_s is not None else now_s
        running_s = self.device_s(now_s)
        return Timings(
            queued_s=started_s - self.submitted_s,
            loading_s=max(first_s - started_s, 0.0),
            running_s=running_s,
            parked_s=max(now_s - first_s - running_s, 0.0),
        )

    def info(self, now_s: float, viewer: str) -> JobInfo:
        """The job as it is shown."""
        return JobInfo(
            job=self.request.job,
            model=self.request.model,
            state=self.state,
            program=self.owner.program,
            position=self.position if self.state == "queued" else None,
            starts_in_s=self.starts_in_s if self.state == "queued" else None,
            step=self.step,
            steps=self.steps,
            submitted_at=self.submitted_at,
            timings=self.timings(now_s),
            mine=self.owner.user == viewer,
        )


def job_key(user: str, job: str) -> str:
    """The name of a user's job within the daemon."""
    return f"{user}/{job}"


def check_id(job: str) -> None:
    """Raise `InvalidRequest` for an id that would not be fit for a log line."""
    if not 1 <= len(job) <= MAX_ID_CHARS or not job.isprintable() or " " in job:
        raise InvalidRequest(
            f"{job[:MAX_ID_CHARS]!r} is not a job id",
            hint=f"use 1 to {MAX_ID_CHARS} printable characters without spaces, such as a UUID",
        )


def fingerprint(request: Submit, frames: Sequence[memoryview]) -> Fingerprint:
    """The fingerprint of a request; the number of its message does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    body = codec.encode(msgspec.structs.replace(request, rid=0))
    digest.update(body)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return Fingerprint(digest.digest(), len(body) + sum(len(frame) for frame in frames))


class JobTable:
    """All jobs that are known, oldest first."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._live: dict[str, Job] = {}
        self._ended: dict[str, None] = {}
        self._ended_of_user: dict[str, dict[str, None]] = {}
        self._taken_of_user: dict[str, dict[str, None]] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Enter a new job."""
        self._jobs[job.key] = job
        self._live[job.key] = job

    def live(self) -> list[Job]:
        """The jobs that have not ended."""
        return list(self._live.values())

    def has_live(self) -> bool:
        """Some job has not ended."""
        return bool(self._live)

    def remove(self, key: str) -> None:
        """Forget a job."""
        job = self._jobs.pop(key, None)
        self._live.pop(key, None)
        self._ended.pop(key, None)
        if job is None:
            return
        for by_user in (self._ended_of_user, self._taken_of_user):
            if (of_user := by_user.get(job.owner.user)) is not None:
                of_user.pop(key, None)
                if not of_user:
                    del by_user[job.owner.user]

    def uses(self, model: str) -> bool:
        """Some job on this model has not ended."""
        return any(job.request.model == model for job in self._live.values())

    def get(self, key: str) -> Job | None:
        """The job of that key."""
        return self._jobs.get(key)

    def find(self, user: str, job: str, administrates: bool) -> Job | None:
        """The job that a user means: its own of that id, or for an administrator, anyone's."""
        own = self._jobs.get(job_key(user, job))
        if own is not None or not administrates:
            return own
        return next((one for one in self if one.request.job == job), None)

    def ended(self, job: Job) -> list[str]:
        """Note that a job has ended; gives the keys of its user's old ones, to be forgotten."""
        self._live.pop(job.key, None)
        self._ended[job.key] = None
        of_user = self._ended_of_user.setdefault(job.owner.user, {})
        of_user[job.key] = None
        excess = len(of_user) - MAX_TOMBSTONES
        if excess <= 0:
            return []
        # A result that nobody has yet is worth more than the memory of one that somebody has.
        taken = self._taken_of_user.get(job.owner.user, {})
        old = list(islice(taken, excess))
        rest = (key for key in of_user if key not in taken)
        return old + list(islice(rest, excess - len(old)))

    def taken(self, job: Job) -> None:
        """Note that the result of a job that has ended was taken."""
        if job.key in self._ended:
            self._taken_of_user.setdefault(job.owner.user, {})[job.key] = None

    def expired(self, ended_before_s: float) -> list[str]:
        """The keys of jobs that ended before a time."""
        expired = []
        for key in self._ended:
            ended_s = self._jobs[key].ended_s
            if ended_s is None or ended_s > ended_before_s:
                break
            expired.append(key)
        return expired
