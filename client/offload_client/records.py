"""What a session remembers about each request and each job, and who wants to know of changes.

A record is changed by the session alone; whoever waits for it adds a watcher, which must not block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from offload_client.pieces import Pieces, Place
from offload_protocol.codec import to_exception
from offload_protocol.errors import OffloadError
from offload_protocol.messages import Finished, Progress, Request, Submit
from offload_protocol.records import FINAL_STATES, JobInfo, JobState
from offload_protocol.values import Frame

MAX_EVENTS_KEPT = 256
"""A reader that falls further behind loses the oldest events, never the last."""

Watcher = Callable[[], None]


class Watched:
    """Something that changes, and those who want to know."""

    __slots__ = ("watchers",)

    def __init__(self) -> None:
        self.watchers: set[Watcher] = set()

    def changed(self) -> None:
        """Tell every watcher."""
        for watcher in tuple(self.watchers):
            watcher()


class Call(Watched):
    """A request from the moment it is made until its answer."""

    __slots__ = (
        "deadline",
        "error",
        "frames",
        "hello_demands",
        "patient",
        "place",
        "record",
        "request",
        "result",
        "retry_at",
        "sent",
    )

    def __init__(
        self,
        request: Request,
        frames: Sequence[Frame] = (),
        *,
        record: JobRecord | None = None,
        patient: bool = False,
        deadline: float | None = None,
    ) -> None:
        super().__init__()
        self.request = request
        self.frames = tuple(frames)
        self.record = record
        self.patient = patient
        """Whether `busy` is waited out, up to `deadline`."""
        self.deadline = deadline
        self.sent = False
        """Whether it was sent on the present connection."""
        self.retry_at: float | None = None
        self.hello_demands = 0
        self.place: Place | None = None
        """The piece of a large result that is asked for, if this asks for one."""
        self.result: dict[str, Any] | None = None
        self.error: OffloadError | None = None

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self.result is not None or self.error is not None

    def answer(self) -> dict[str, Any]:
        """The result; raises the error that came instead of one."""
        if self.error is not None:
            raise self.error
        return self.result or {}


class JobRecord(Watched):
    """A job that this client follows: how it was said, what was heard of it, how it ended."""

    __slots__ = (
        "__weakref__",
        "error",
        "events",
        "events_total",
        "farewell",
        "finished",
        "frames",
        "id",
        "model",
        "pieces",
        "preview_frames",
        "result",
        "result_frames",
        "state",
        "submit",
    )

    def __init__(
        self, job: str, *, submit: Submit | None = None, frames: Sequence[Frame] = ()
    ) -> None:
        super().__init__()
        self.id = job
        self.submit = submit
        """The request that made the job, or None where another client made it."""
        self.frames = tuple(frames)
        self.model = submit.model if submit else ""
        self.state: JobState = "queued"
        self.events: deque[Progress] = deque(maxlen=MAX_EVENTS_KEPT)
        self.events_total = 0
        self.preview_frames: tuple[Frame, ...] = ()
        """Of the latest picture of how far it is: earlier ones are of no use."""
        self.finished: Finished | None = None
        self.result_frames: tuple[Frame, ...] = ()
        self.pieces: Pieces | None = None
        """The result while it arrives in pieces."""
        self.result: object = None
        """The result as it was handed to the program, for those who ask again."""
        self.farewell: Finished | None = None
        """The end that a stopping daemon gave it, which is none if another daemon takes over."""
        self.error: OffloadError | None = None
        """Why the job cannot be followed any longer, although no end of it was heard."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.finished is not None or self.error is not None

    def progressed(self, event: Progress, frames: Sequence[Frame] = ()) -> None:
        """Note an event with its picture's frame; one that says nothing new is left out."""
        if self.ended or (self.events and self.events[-1] == event):
            return
        if event.preview is not None:
            self.preview_frames = tuple(frames)
        self.state = event.state
        self.events.append(event)
        self.events_total += 1
        self.changed()

    def described(self, info: JobInfo) -> None:
        """Note what an answer says about the job."""
        self.model = info.model
        if info.state not in FINAL_STATES:
            self.progressed(
                Progress(
                    job=self.id,
                    state=info.state,
                    position=info.position,
                    step=info.step,
                    steps=info.steps,
                )
            )

    def ends(self, finished: Finished, frames: Sequence[Frame]) -> None:
        """Note the end; the first one heard counts."""
        if self.ended:
            return
        last = self.events[-1] if self.events else None
        steps = last.steps if last else 0
        step = steps if finished.state == "done" else (last.step if last else 0)
        self.progressed(Progress(job=self.id, state=finished.state, step=step, steps=steps))
        self.finished, self.result_frames = finished, tuple(frames)
        self.frames, self.pieces, self.preview_frames = (), None, ()
        self.changed()

    def fails(self, error: OffloadError) -> None:
        """Note that the job cannot be followed any longer."""
        if self.ended:
            return
        self.state, self.error = "failed", error
        self.changed()

    def events_after(self, seen: int) -> tuple[list[Progress], int]:
        """The events kept since `seen` of them were read, and how many there were in all."""
        kept = list(self.events)
        missed = self.events_total - seen
        return (kept[-missed:] if missed > 0 else []), self.events_total

    def failure(self) -> OffloadError | None:
        """The error that the job ended with, if it did."""
        if self.error is not None:
            return self.error
        if self.finished is not None and self.finished.error is not None:
            return to_exception(self.finished.error)
        return None
