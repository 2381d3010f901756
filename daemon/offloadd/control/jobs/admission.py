"""From a request to a job: all that can be refused before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence

from offload_protocol import values
from offload_protocol.errors import InvalidRequest
from offload_protocol.limits import Limits, check_seed
from offload_protocol.messages import Submit
from offloadd.control.clocks import Clocks
from offloadd.control.jobs.adapters import check_adapters
from offloadd.control.jobs.arguments import Bounds, check_arguments
from offloadd.control.jobs.jobs import Fingerprint, Job, Owner, job_key
from offloadd.control.models.hosted_model import HostedModel
from offloadd.control.models.models import ModelTable

MAX_PRIORITY = 100


class Admission:
    """Measures requests against the limits and against what their models take."""

    def __init__(self, models: ModelTable, limits: Limits, bounds: Bounds, clocks: Clocks) -> None:
        self._models = models
        self._limits = limits
        self._bounds = bounds
        self._clocks = clocks

    def admit(
        self, owner: Owner, request: Submit, frames: Sequence[memoryview], mark: Fingerprint
    ) -> Job:
        """The job that a request asks for; `mark` is its fingerprint.

        Raises `UnknownModel`, `InvalidRequest`, `TooLarge`, or why the model cannot be hosted.
        """
        values.check(request.arguments, frames, self._limits)
        _check_numbers(request)
        model = self._models.find(request.model)
        self._models.ask_again(model)
        self._models.check(model)
        check_adapters(request.adapters, model.spec)
        job = Job(
            key=job_key(owner.user, request.job),
            request=request,
            owner=owner,
            fingerprint=mark,
            frames=tuple(frames),
            submitted_at=self._clocks.wall_s(),
            submitted_s=self._clocks.monotonic_s(),
            seed=self._clocks.new_seed() if request.seed is None else request.seed,
            watchers={owner.client},
        )
        self.check(job, model)
        return job

    def check(self, job: Job, model: HostedModel) -> None:
        """Compare the arguments with what the model takes, once, as soon as that is known."""
        if model.described is not None and not job.checked:
            check_arguments(job.request.arguments, model.described, self._bounds)
            job.checked = True


def _check_numbers(request: Submit) -> None:
    check_seed(request.seed)
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"the priority is {request.priority}",
            hint=f"it takes -{MAX_PRIORITY} to {MAX_PRIORITY}",
        )
    if request.keep_alive_s is not None and request.keep_alive_s != request.keep_alive_s:
        raise InvalidRequest("keep_alive_s is not a number", hint="give seconds, or -1 for ever")
    for name in ("queue_timeout_s", "run_timeout_s", "preview_every_s"):
        value = getattr(request, name)
        # Written so that a NaN is refused as well.
        if value is not None and not 0 < value < float("inf"):
            raise InvalidRequest(f"{name} is {value}", hint="give a positive number of seconds")
