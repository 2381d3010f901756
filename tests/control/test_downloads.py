"""Models that are not whole in the hub cache are downloaded beside everything else, or fail."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import psutil
import pytest

from offload_protocol.records import ErrorInfo
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.messages import ModelFailed, Register, ToWorker
from offloadd.control.models.downloads import Downloads
from offloadd.control.models.models import ModelTable

WHOLE = 'print(\'{"done_bytes": 1, "total_bytes": 2}\\n{"is_whole": true}\')'
REFUSED = 'print(\'{"error": {"code": "model_load_failed", "message": "no", "hint": "try"}}\')'
SILENT = "pass"
ENDLESS = 'import time; print(\'{"done_bytes": 1, "total_bytes": 2}\', flush=True); time.sleep(600)'
NOT_CACHED = ModelFailed(
    name="m",
    error=ErrorInfo(code="model_load_failed", message="gone", details={"kind": "not_cached"}),
)


class Table:
    """One model, and what is ordered and said of it."""

    def __init__(
        self, script: str, source: str = "own/er", *, is_allowed: bool = True, **options: Any
    ) -> None:
        self.orders: list[ToWorker] = []
        self.failed: list[ModelFailed] = []
        self.models = ModelTable(
            [model_spec("m", source, options)], self.orders.append, lambda: 0.0
        )
        self.models.worker_ready()
        self.orders.clear()
        self.model = self.models.find("m")
        self.downloads = Downloads(
            self.models,
            is_allowed,
            {},
            self.failed.append,
            (sys.executable, "-c", f"import sys; sys.stdin.read(); {script}"),
        )

    async def settle(self) -> None:
        while self.model.download is not None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "options"), [("own/er", {}), ("/a/file.safetensors", {"config": "own/er"})]
)
async def test_a_model_that_was_brought_is_described_again(
    source: str, options: dict[str, Any]
) -> None:
    table = Table(WHOLE, source, **options)
    assert table.downloads.takes(NOT_CACHED)
    assert table.model.info().state == "downloading"
    assert table.downloads.takes(NOT_CACHED), "a new worker has looked meanwhile"
    await table.settle()
    assert [type(order) for order in table.orders] == [Register]
    # What is still wrong is the model's own fault.
    assert not table.downloads.takes(NOT_CACHED)
    assert not table.failed


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [(REFUSED, "model_load_failed", "no"), (SILENT, "internal", "ended with 0")],
)
async def test_a_download_that_fails_is_a_model_that_failed(
    script: str, code: str, told: str
) -> None:
    table = Table(script)
    assert table.downloads.takes(NOT_CACHED)
    await table.settle()
    (failed,) = table.failed
    assert failed.error.code == code
    assert told in failed.error.message
    assert not table.orders
    # Asked for once more, it is tried once more.
    assert table.downloads.takes(NOT_CACHED)
    await table.settle()
    assert len(table.failed) == 2


async def test_a_model_that_is_not_wanted_any_more_is_not_downloaded() -> None:
    # Daemons of other tests may be there as well.
    before = set(psutil.Process().children())
    table = Table(ENDLESS)
    assert table.downloads.takes(NOT_CACHED)
    while not (told := table.model.info().download) or not told.total_bytes:
        await asyncio.sleep(0.01)
    assert (told.done_bytes, told.total_bytes) == (1, 2)
    (child,) = set(psutil.Process().children()) - before
    table.downloads.dropped("m")
    await table.settle()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not table.failed
    assert table.downloads.takes(NOT_CACHED)
    await table.downloads.close()
    assert table.model.download is None


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"is_allowed": False}, "not_cached"),
        ({"source": "/a/path"}, "missing"),
        ({}, "unfit"),
    ],
)
async def test_what_no_download_mends_is_not_downloaded(table: dict[str, Any], kind: str) -> None:
    error = ErrorInfo(code="model_load_failed", message="gone", details={"kind": kind})
    assert not Table(WHOLE, **table).downloads.takes(ModelFailed(name="m", error=error))
