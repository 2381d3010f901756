"""What the process that downloads models is told and what it says, one JSON object a line."""

from __future__ import annotations

import msgspec

from offload_protocol.records import ErrorInfo


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the hub; without weights, its configurations alone are wanted."""

    repository: str
    revision: str = "main"
    with_weights: bool = True


class DownloadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Models to be brought into the hub cache, as far as a pipeline needs their files.

    `without` names components whose weights come from elsewhere; `pickles` says that weights are
    wanted also where they are only there as pickles.
    """

    wanted: list[Wanted]
    variant: str | None = None
    without: list[str] = []
    pickles: bool = False


class DownloadNews(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is; the last one has `is_whole` or an error."""

    done_bytes: int = 0
    total_bytes: int = 0
    is_whole: bool = False
    error: ErrorInfo | None = None
