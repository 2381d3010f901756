"""Brings one file of weights from the hub, so that a download that broke off goes on from there.

huggingface_hub gives up what it has of a file when the connection or the process ends. Here it
stays under a name of its own in the cache, and becomes the cache's blob when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from offload_protocol.errors import Busy, StorageFailed

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch_weights(repository: str, commit: str, name: str, entry: Path) -> None:
    """Bring a file into the blobs of a model's `entry` in the cache, if it is not there.

    What the hub does not say enough of, or gives only in pieces, is left to its library. Raises
    what that raises, `Busy` where another process brings the same file, and `StorageFailed` for
    bytes that are not those of the hub.
    """
    url = hf_hub_url(repository, name, revision=commit)
    told = get_hf_file_metadata(url)
    if told.etag is None or told.size is None or told.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    blob = entry / "blobs" / told.etag
    if blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{told.etag}.offloadd.incomplete")
    with part.open("ab") as file:
        _own(file, name)
        before_bytes = file.tell()
        if before_bytes > told.size:
            before_bytes = file.truncate(0)
        http_get(
            url,
            file,
            resume_size=before_bytes,
            headers=build_hf_headers(),
            expected_size=told.size,
        )
    if before_bytes:
        _check(part, told.etag, name)
    part.replace(blob)


def _own(file: BinaryIO, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(
            f"another process is downloading {name}", hint="load the model again when it is done"
        ) from None


def _check(part: Path, etag: str, name: str) -> None:
    # Only large files are called by their contents; others have a size alone.
    if not _SHA256.fullmatch(etag):
        return
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != etag:
        part.unlink()
        raise StorageFailed(
            f"what was downloaded of {name} is not what the hub has, and was deleted",
            hint="load the model again; if it comes again, check the disk and the network",
        )
