"""How long a model stays in memory after its last use, and its leaving when that is over.

The job that used it last decides (`keep_alive_s` of its request), else the model's own setting,
else the daemon's. Below 0 means for ever, 0 at once. A pinned model stays, and one that some job
still needs is never asked to leave.
"""

from __future__ import annotations

from collections.abc import Callable

from offload_protocol.sizes import format_duration
from offloadd.control.clocks import Clocks
from offloadd.control.jobs.jobs import Job
from offloadd.control.models.hosted_model import HostedModel
from offloadd.control.models.models import ModelTable


class KeepAlive:
    """Watches the models; `is_used` says whether a job that has not ended needs one."""

    def __init__(
        self,
        models: ModelTable,
        is_used: Callable[[str], bool],
        default_s: float,
        clocks: Clocks,
    ) -> None:
        self._models = models
        self._is_used = is_used
        self._default_s = default_s
        self._clocks = clocks

    def job_ended(self, job: Job) -> None:
        """A job has ended: where it was the last on its model, the model's time begins."""
        name = job.request.model
        if self._is_used(name):
            return
        self._models.unused(name)
        model = self._models.get(name)
        if model is not None:
            self._begin(model, job.request.keep_alive_s)

    def model_loaded(self, name: str) -> None:
        """A model is in memory; where no job wanted it, its time begins."""
        model = self._models.get(name)
        if model is not None and not self._is_used(name):
            self._begin(model, None)

    def tick(self) -> None:
        """Let go of the models whose time is over."""
        now_s = self._clocks.monotonic_s()
        for model in self._models:
            if model.idle_until_s is None:
                continue
            if self._is_used(model.spec.name):
                model.idle_until_s = model.expires_at = None
            elif model.idle_until_s <= now_s and not model.is_pinned:
                idle = format_duration(max(now_s - (model.idle_since_s or now_s), 0.0))
                self._models.let_go(model, f"left: not used for {idle}")

    def _begin(self, model: HostedModel, requested_s: float | None) -> None:
        keep_s = self._default_s
        for given_s in (requested_s, model.spec.keep_alive):
            if given_s is not None:
                keep_s = given_s
                break
        model.idle_since_s = self._clocks.monotonic_s()
        model.idle_until_s = model.expires_at = None
        if keep_s >= 0:
            model.idle_until_s = model.idle_since_s + keep_s
            model.expires_at = self._clocks.wall_s() + keep_s
