"""Has models downloaded that are not whole in the hub cache, by one process at a time.

Promises: nothing here waits for it, and no worker does; a model that is unloaded meanwhile is no
longer downloaded; one whose download ends well is described again, and one whose download fails has
failed as any other, so that it is tried again after the same pauses.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from offload_protocol import codec
from offload_protocol.errors import InternalError
from offload_protocol.records import ErrorInfo
from offloadd.channel.checked_specs import HUB_ID
from offloadd.channel.downloads import DownloadNews, DownloadOrder, Wanted
from offloadd.channel.messages import ModelFailed
from offloadd.channel.specs import ModelSpec
from offloadd.control.models.hosted_model import HostedModel
from offloadd.control.models.models import ModelTable
from offloadd.control.workers.child import child
from offloadd.control.workers.supervisor import worker_environment

COMMAND = (sys.executable, "-P", "-m", "offloadd.hosting.sources.hub_download")

_INCOMPLETE = frozenset(
    {
        *("not_cached", "missing_ref", "missing_snapshot", "not_a_pipeline", "missing_component"),
        *("missing", "missing_shards", "no_weights", "no_index", "no_config", "dangling_link"),
        *("missing_variant", "lacks_components"),
    }
)
"""Problems that a model has of which not everything was downloaded."""

_log = logging.getLogger(__name__)


class Downloads:
    """The downloads under way. `on_failed` is told what is to be said of a model instead."""

    def __init__(
        self,
        models: ModelTable,
        is_allowed: bool,
        environ: Mapping[str, str],
        on_failed: Callable[[ModelFailed], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._models = models
        self._is_allowed = is_allowed
        self._environ = worker_environment(environ)
        self._on_failed = on_failed
        self._command = tuple(command)
        self._one_at_a_time = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._brought: set[str] = set()
        """Models that were brought and are being described again."""

    def takes(self, news: ModelFailed) -> bool:
        """Whether a model that cannot be described is being downloaded instead."""
        model = self._models.get(news.name)
        if model is None or model.is_leaving or (model.is_registered and not model.is_loading):
            return False
        if news.name in self._tasks:
            # A new worker has looked at it meanwhile.
            return True
        wanted = _wanted(model.spec)
        if news.name in self._brought:
            self._brought.discard(news.name)
            return False
        if not self._is_allowed or not wanted or news.error.details.get("kind") not in _INCOMPLETE:
            return False
        model.download = DownloadNews()
        task = asyncio.get_running_loop().create_task(self._bring(model, wanted))
        self._tasks[news.name] = task
        task.add_done_callback(partial(self._ended, model))
        return True

    def known(self, name: str) -> None:
        """A model was described."""
        self._brought.discard(name)

    def dropped(self, name: str) -> None:
        """A model is not wanted any more."""
        self._brought.discard(name)
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    def _ended(self, model: HostedModel, task: asyncio.Task[None]) -> None:
        # Not in the task, which may be called off before it has begun.
        model.download = None
        if self._tasks.get(model.spec.name) is task:
            del self._tasks[model.spec.name]
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("the download of %s ended by a fault", model.spec.source, exc_info=fault)
            failed = InternalError(f"the download ended by a fault of its own: {fault}")
            self._on_failed(ModelFailed(name=model.spec.name, error=codec.error_info(failed)))

    async def close(self) -> None:
        """End all downloads; what has come stays in the cache."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring(self, model: HostedModel, wanted: list[Wanted]) -> None:
        name = model.spec.name
        async with self._one_at_a_time:
            error = await self._run(model, wanted)
        model.download = None
        if self._models.get(name) is not model or model.is_leaving:
            return
        if error is not None:
            self._on_failed(ModelFailed(name=name, error=error))
            return
        _log.info("model %s was downloaded", name)
        self._brought.add(name)
        self._models.describe_again(model)

    async def _run(self, model: HostedModel, wanted: list[Wanted]) -> ErrorInfo | None:
        spec = model.spec
        order = DownloadOrder(
            wanted=wanted,
            variant=spec.variant,
            without=[name for name, one in spec.components.items() if one.source is not None],
            pickles=spec.weights_only,
        )
        try:
            async with child(self._command, self._environ, "downloads") as process:
                last = await _listen(process, order, model)
        except InternalError as error:
            return codec.error_info(error)
        if last.error is not None or last.is_whole:
            return last.error
        failed = InternalError(
            f"the process that downloads {spec.source} ended with {process.returncode}",
            hint="see the daemon's log; what has come stays",
        )
        return codec.error_info(failed)


async def _listen(
    process: asyncio.subprocess.Process, order: DownloadOrder, model: HostedModel
) -> DownloadNews:
    assert process.stdin is not None  # both were asked for
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(order))
    process.stdin.close()
    last = DownloadNews()
    async for line in process.stdout:
        try:
            last = msgspec.json.decode(line, type=DownloadNews)
        except msgspec.DecodeError:
            continue
        if last.total_bytes:
            model.download = last
    await process.wait()
    return last


def _wanted(spec: ModelSpec) -> list[Wanted]:
    if HUB_ID.fullmatch(spec.source):
        return [Wanted(repository=spec.source, revision=spec.revision or "main")]
    if spec.config is not None and HUB_ID.fullmatch(spec.config):
        return [Wanted(repository=spec.config, with_weights=False)]
    return []
