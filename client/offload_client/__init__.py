"""The Python client of offloadd; imports no torch.

    from offload_client import Client

    with Client() as client:
        result = client.generate("shapes", "a red circle on a white background", seed=7)
        result.image.save("red.png")

`AsyncClient` is the same for asyncio. Every error is an `OffloadError`; `offload_protocol.errors`
shows the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_client.client import Client
from offload_client.job import Job
from offload_client.results import Progress, Result
from offload_protocol.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    IdConflict,
    InternalError,
    InvalidRequest,
    ModelLoadFailed,
    OffloadError,
    OutOfMemory,
    ProtocolMismatch,
    ShuttingDown,
    StorageFailed,
    TimedOut,
    TooLarge,
    Unauthorized,
    UnknownJob,
    UnknownModel,
    Unreachable,
    WorkerCrashed,
)
from offload_protocol.records import ComponentInfo, Forecast, JobInfo, JobState, ModelInfo, Timings

if TYPE_CHECKING:
    from offload_client.aio import AsyncClient
    from offload_client.aio_job import AsyncJob

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Busy",
    "Cancelled",
    "Client",
    "ComponentInfo",
    "DeadlineExceeded",
    "ErrorCode",
    "Forecast",
    "IdConflict",
    "InternalError",
    "InvalidRequest",
    "Job",
    "JobInfo",
    "JobState",
    "ModelInfo",
    "ModelLoadFailed",
    "OffloadError",
    "OutOfMemory",
    "Progress",
    "ProtocolMismatch",
    "Result",
    "ShuttingDown",
    "StorageFailed",
    "TimedOut",
    "Timings",
    "TooLarge",
    "Unauthorized",
    "UnknownJob",
    "UnknownModel",
    "Unreachable",
    "WorkerCrashed",
]


def __getattr__(name: str) -> object:
    # asyncio alone takes longer to import than all the rest; plain programs go without.
    if name == "AsyncClient":
        from offload_client.aio import AsyncClient

        return AsyncClient
    if name == "AsyncJob":
        from offload_client.aio_job import AsyncJob

        return AsyncJob
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
