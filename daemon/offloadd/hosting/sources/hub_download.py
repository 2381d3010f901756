"""Brings models from the hub into its cache: an order on standard input, news on standard output.

A process of its own: it takes as long as it takes, and is ended by ending it; what it has brought
stays, and the next one goes on from there. Imports neither torch nor diffusers.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
from huggingface_hub import HfApi, constants
from huggingface_hub import errors as hub
from huggingface_hub.hf_api import RepoSibling

from offload_protocol.codec import error_info
from offload_protocol.errors import ModelLoadFailed, OffloadError, StorageFailed
from offload_protocol.sizes import format_size
from offloadd.channel.downloads import DownloadNews, DownloadOrder, Wanted
from offloadd.channel.parent import end_with_parent
from offloadd.hosting.sources.hub_weights import fetch_weights
from offloadd.store.index.hub_cache import hub_cache
from offloadd.store.index.hub_files import BESIDE_WEIGHTS, needed_files
from offloadd.store.index.pipeline import MODEL_INDEX_NAME
from offloadd.store.index.strict_json import parse_object

FREE_RESERVE_BYTES = 1 << 30
"""Left free on the disk, which others use as well."""

TELL_EVERY_S = 0.5
_TRANSPORT = [
    one
    for one in hub.HfHubHTTPError.__mro__
    if issubclass(one, Exception) and one.__name__ == "HTTPError"
]
_UNREACHED: tuple[type[Exception], ...] = (
    *_TRANSPORT,
    hub.LocalEntryNotFoundError,
    hub.EntryNotFoundError,
)
"""Connections that fail, whichever library the hub's library connects with."""


def main() -> None:
    """Carry out one order; the last line is the end, whichever it is."""
    end_with_parent()
    news = _News(os.dup(1))
    os.dup2(2, 1)  # what libraries print is no news
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=DownloadOrder)
    try:
        download(order, news)
    except OffloadError as error:
        news.say(DownloadNews(error=error_info(error)))
    else:
        news.say(DownloadNews(is_whole=True))


class _News:
    """One JSON object a line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def say(self, news: DownloadNews) -> None:
        """Write it at once."""
        with self._lock:
            os.write(self._descriptor, msgspec.json.encode(news) + b"\n")


def download(order: DownloadOrder, news: _News) -> None:
    """Bring what is missing; raises `ModelLoadFailed` and `StorageFailed` with what to do."""
    if constants.HF_HUB_OFFLINE:
        names = ", ".join(one.repository for one in order.wanted)
        raise ModelLoadFailed(
            f"{names} is not whole in the hub cache, and HF_HUB_OFFLINE forbids to download it",
            hint="unset HF_HUB_OFFLINE for the daemon, or copy the model into the cache",
            details={"kind": "offline"},
        )
    cache = hub_cache(os.environ)
    for wanted in order.wanted:
        with _told(wanted, cache):
            _bring(order, wanted, cache, news)


def _bring(order: DownloadOrder, wanted: Wanted, cache: Path, news: _News) -> None:
    api = HfApi()
    info = api.model_info(wanted.repository, revision=wanted.revision, files_metadata=True)
    told = {one.rfilename: one for one in info.siblings or ()}
    sizes = {name: one.size or 0 for name, one in told.items()}
    if MODEL_INDEX_NAME not in sizes:
        raise ModelLoadFailed(
            f"{wanted.repository} on the hub is no diffusers pipeline: it has no "
            f"{MODEL_INDEX_NAME}",
            hint="name a model in diffusers' form; a single file is downloaded by hand and hosted "
            "with config",
            details={"kind": "not_a_pipeline", "repository": wanted.repository},
        )
    index = parse_object(_index_text(wanted, cache))
    without = order.without if wanted.with_weights else list(index)
    files = needed_files(
        index, sizes, variant=order.variant, without=without, pickles=order.pickles
    )
    entry = cache / f"models--{wanted.repository.replace('/', '--')}"
    total_bytes = sum(sizes[name] for name in files)
    before_bytes = _held_bytes(entry)
    missing_bytes = _missing_bytes(entry, info.sha or "", [told[name] for name in files])
    _check_room(cache, wanted, missing_bytes)

    def tell() -> None:
        brought = max(0, _held_bytes(entry) - before_bytes)
        done = min(total_bytes, total_bytes - missing_bytes + brought)
        news.say(DownloadNews(done_bytes=done, total_bytes=total_bytes))

    with _told_regularly(tell):
        for name in files:
            if not name.endswith(BESIDE_WEIGHTS):
                fetch_weights(wanted.repository, info.sha or wanted.revision, name, entry)
        # Links to what is there now, and brings what is small.
        huggingface_hub.snapshot_download(
            wanted.repository,
            revision=wanted.revision,
            cache_dir=cache,
            allow_patterns=[glob.escape(name) for name in files],
        )


def _index_text(wanted: Wanted, cache: Path) -> bytes:
    path = huggingface_hub.hf_hub_download(
        wanted.repository, MODEL_INDEX_NAME, revision=wanted.revision, cache_dir=cache
    )
    return Path(path).read_bytes()


def _held_bytes(entry: Path) -> int:
    """What the cache holds of a model, parts of files too."""
    blobs = entry / "blobs"
    held = 0
    for path in blobs.iterdir() if blobs.is_dir() else ():
        try:
            held += path.stat().st_size
        except FileNotFoundError:
            continue  # it was finished and renamed meanwhile
    return held


def _missing_bytes(entry: Path, commit: str, files: Iterable[RepoSibling]) -> int:
    """What is still to come; files that are whole and not linked yet, and begun ones, are not."""
    snapshot, blobs = entry / "snapshots" / commit, entry / "blobs"
    missing = sum(
        one.size or 0
        for one in files
        if not (snapshot / one.rfilename).is_file() and not _is_there(blobs, one)
    )
    begun = sum(one.stat().st_size for one in blobs.glob("*.incomplete")) if blobs.is_dir() else 0
    return max(0, missing - begun)


def _is_there(blobs: Path, file: RepoSibling) -> bool:
    # The cache calls large files by their contents, and others by what git calls them.
    name = file.lfs.sha256 if file.lfs is not None else file.blob_id
    return bool(name) and (blobs / str(name)).is_file()


def _check_room(cache: Path, wanted: Wanted, missing_bytes: int) -> None:
    place = cache
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if missing_bytes and free_bytes < missing_bytes + FREE_RESERVE_BYTES:
        raise StorageFailed(
            f"{wanted.repository} takes {format_size(missing_bytes)} more in {cache}, where "
            f"{format_size(free_bytes)} are free, {format_size(FREE_RESERVE_BYTES)} of which stay "
            "free",
            hint="free space there, or set HF_HOME to a larger disk",
            details={"directory": str(cache), "size_bytes": missing_bytes},
        )


@contextmanager
def _told_regularly(tell: Any) -> Iterator[None]:
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(TELL_EVERY_S):
            tell()

    tell()
    thread = threading.Thread(target=go_on, name="progress")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _told(wanted: Wanted, cache: Path) -> Iterator[None]:
    """Give what fails within the block a code and a sentence."""
    name = f"{wanted.repository} ({wanted.revision})"
    try:
        yield
    except hub.GatedRepoError as error:
        raise _failed(
            name,
            "may only be downloaded by those who were granted it",
            "accept its terms on the hub, and give the daemon an access token (HF_TOKEN)",
            "gated",
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise _failed(
            name,
            "is not on the hub, or only for those with access",
            "check the name; for a private model give the daemon an access token (HF_TOKEN)",
            "no_repository",
        ) from error
    except hub.RevisionNotFoundError as error:
        raise _failed(
            name,
            "is not on the hub in this revision",
            "name a branch, a tag or a commit that it has",
            "no_revision",
        ) from error
    except hub.HFValidationError as error:
        raise _failed(name, f"is no name on the hub: {error}", "check it", "bad_name") from error
    except _UNREACHED as error:
        told = " ".join(str(error.__cause__ or error).split())[:300]
        raise _failed(
            name,
            f"cannot be downloaded from {constants.ENDPOINT}: {type(error).__name__}: {told}",
            "check the network and HF_ENDPOINT; what has come stays and the next attempt goes on "
            "from there; with hosting.download = false nothing is downloaded",
            "unreachable",
        ) from error
    except ValueError as error:
        raise _failed(
            name,
            f"is not described as a model is: {error}",
            "look whether something between the daemon and the hub answers in its place",
            "bad_answer",
        ) from error
    except OSError as error:
        raise StorageFailed(
            f"{name} cannot be written to {cache}: {error.strerror or error}",
            hint="let the daemon's user write there, free space, or set HF_HOME",
            details={"directory": str(cache)},
        ) from error


def _failed(name: str, problem: str, hint: str, kind: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"{name} {problem}", hint=hint, details={"kind": kind, "model": name})


if __name__ == "__main__":
    main()
