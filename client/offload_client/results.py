"""What a program gets back: progress while a job runs, and its result."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_client.records import JobRecord
from offload_protocol import messages
from offload_protocol.errors import InvalidRequest
from offload_protocol.records import JobState, Timings
from offload_protocol.values import unpack

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job is.

    `position` is its place in the queue (1 is next), None once it left the queue. `step` of `steps`
    counts as the pipeline's own progress bar does; `steps` is 0 while unknown. `preview` is a rough
    grey picture of how far it is, now and then, where the job was asked to show it.
    """

    state: JobState
    position: int | None
    step: int
    steps: int
    preview: Image.Image | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a job made, and what it cost.

    `outputs` holds every output of the pipeline by its name: PIL images, numpy arrays (read-only),
    lists, maps, numbers and texts. Times are seconds, memory is bytes.
    """

    job: str
    model: str
    outputs: dict[str, Any]
    seeds: tuple[int, ...]
    """The seed of each picture: with it, the picture can be made again alone."""
    timings: Timings
    """`queued_s`, `loading_s`, `running_s`."""
    peak_device_bytes: int
    moved_bytes: int
    """Bytes of weights that were copied to the device for this job."""

    @property
    def images(self) -> list[Image.Image]:
        """The pictures; raises `InvalidRequest` where the job made none."""
        images = self.outputs.get("images")
        if not isinstance(images, list) or not images or not hasattr(images[0], "save"):
            raise InvalidRequest(
                f"the job made no pictures, its outputs are: {', '.join(self.outputs) or 'none'}",
                hint="read them from result.outputs",
            )
        return images

    @property
    def image(self) -> Image.Image:
        """The first picture; raises `InvalidRequest` where the job made none."""
        return self.images[0]

    @property
    def seed(self) -> int | None:
        """The seed of the first picture."""
        return self.seeds[0] if self.seeds else None


def progress_of(event: messages.Progress, record: JobRecord) -> Progress:
    """An event as a program sees it; of pictures, the latest alone is still there."""
    preview = None
    if event.preview is not None and record.preview_frames:
        frames, record.preview_frames = record.preview_frames, ()
        with suppress(InvalidRequest):
            preview = unpack(event.preview, frames)
    return Progress(event.state, event.position, event.step, event.steps, preview)


def result_of(record: JobRecord) -> Result:
    """The result of an ended job; raises the error that it ended with."""
    failure = record.failure()
    if failure is not None:
        raise failure
    outcome = record.finished.outcome if record.finished else None
    if outcome is None:
        raise InvalidRequest(f"the daemon ended job {record.id} with neither a result nor an error")
    outputs = unpack(outcome.outputs, record.result_frames)
    return Result(
        job=record.id,
        model=record.model,
        outputs=outputs,
        seeds=tuple(outcome.seeds),
        timings=outcome.timings,
        peak_device_bytes=outcome.peak_device_bytes,
        moved_bytes=outcome.moved_bytes,
    )
