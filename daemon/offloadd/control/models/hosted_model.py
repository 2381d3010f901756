"""One hosted model as the control plane knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from offload_protocol.records import DownloadInfo, ErrorInfo, ModelInfo
from offloadd.channel.downloads import DownloadNews
from offloadd.channel.messages import ModelDescribed, ModelLoaded
from offloadd.channel.specs import ModelSpec

Waiter = asyncio.Future[ModelInfo]


@dataclass(slots=True, eq=False)
class HostedModel:
    """One model; `configured` says that it comes from the configuration and is never forgotten."""

    spec: ModelSpec
    configured: bool
    described: ModelDescribed | None = None
    loaded: ModelLoaded | None = None
    error: ErrorInfo | None = None
    is_registered: bool = False
    """The present worker has described it, so that it can be loaded and jobs can run."""
    is_loading: bool = False
    is_wanted: bool = False
    """It was loaded on purpose, so it comes back with a new worker."""
    is_leaving: bool = False
    """It takes no new jobs and is forgotten once its last one has ended."""
    is_unloading: bool = False
    """The worker was told to unload it and has not answered."""
    leaves_when_free: bool = False
    """It is to be unloaded once no job is in the middle of it; none begins before that."""
    is_pinned: bool = False
    shares: bool = False
    """Its jobs take less time together than one after the other, so the worker says."""
    download: DownloadNews | None = None
    """How far it is while it is being downloaded, before it can be described."""
    activations_bytes: int = 0
    """The most that one of its jobs has been seen to take on the device by itself."""
    failures: int = 0
    """Loads in a row that failed."""
    retry_at_s: float = 0.0
    idle_since_s: float | None = None
    idle_until_s: float | None = None
    expires_at: float | None = None
    """The same as `idle_until_s`, in seconds since the epoch."""
    reason: str = ""
    """Why it is in memory, or why it left."""
    load_waiters: list[Waiter] = field(default_factory=list)
    unload_waiters: list[Waiter] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Jobs can run on it now."""
        return self.loaded is not None and self.is_registered and not self.is_going

    @property
    def is_going(self) -> bool:
        """It is leaving memory, or about to."""
        return self.is_unloading or self.leaves_when_free

    def info(self) -> ModelInfo:
        """The model as it is shown."""
        described, loaded = self.described, self.loaded
        components = loaded.components if loaded else described.components if described else []
        return ModelInfo(
            name=self.spec.name,
            source=self.spec.source,
            pipeline=described.pipeline if described else "",
            state=(
                "ready"
                if loaded
                else "downloading"
                if self.download
                else "loading"
                if self.is_loading
                else "failed"
                if self.error
                else "registered"
            ),
            offload=(
                loaded.offload
                if loaded
                else described.offload
                if described
                else self.spec.offload.mode
            ),
            dtype=described.dtype if described else self.spec.dtype,
            bytes=sum(component.bytes for component in components),
            components=components,
            error=self.error,
            pinned=self.is_pinned,
            expires_at=self.expires_at if loaded and not self.is_pinned else None,
            reason=self.reason,
            notes=described.notes if described else [],
            download=(
                None
                if self.download is None
                else DownloadInfo(
                    done_bytes=self.download.done_bytes, total_bytes=self.download.total_bytes
                )
            ),
        )
