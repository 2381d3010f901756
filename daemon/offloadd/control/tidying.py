"""What a starting daemon tidies up before any worker is there to use it."""

from __future__ import annotations

import logging

from offloadd.store.pack_cache import cache_directory, clear_out, size_limit_bytes

_log = logging.getLogger(__name__)


def clear_out_packs(limit: str) -> None:
    """Delete packs that serve no more, and those beyond a limit such as `200GiB` or `50%`.

    Before any worker: what one of ours will open late, the file itself does not know yet.
    """
    directory = cache_directory()
    try:
        cleared = clear_out(directory, size_limit_bytes(directory, limit))
    except OSError as error:
        _log.warning("%s is not cleared out: %s", directory, error.strerror)
        return
    if cleared.packs:
        _log.info("deleted %d packs (%d bytes) of %s", cleared.packs, cleared.size_bytes, directory)
