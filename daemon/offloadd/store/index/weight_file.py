"""One safetensors file on disk: opened safely, told from its imposters, its header checked.

Reads the header only. Every problem is a `ModelLoadFailed` that names the file (and the tensor),
what was expected and what was found; a failing disk is a `StorageFailed`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from offload_protocol.errors import ModelLoadFailed, StorageFailed
from offloadd.store.index.content import HEAD_BYTES, recognise
from offloadd.store.index.header import (
    LENGTH_BYTES,
    BadHeader,
    Header,
    header_length,
    parse_header,
)
from offloadd.store.index.identity import FileIdentity
from offloadd.store.layout import TensorSpec

_DOWNLOAD_AGAIN = "download it again; the copy here is damaged"


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A weight file in the state in which its header was read."""

    path: Path
    identity: FileIdentity

    @property
    def size_bytes(self) -> int:
        return self.identity.size_bytes


@dataclass(frozen=True, slots=True)
class FileContents:
    """The tensors of one file; `starts` gives each one's first byte counted from the file's."""

    file: IndexedFile
    specs: Mapping[str, TensorSpec]
    starts: Mapping[str, int]
    metadata: Mapping[str, str]


def read_weight_file(path: Path) -> FileContents:
    """Read and check one file's header.

    Raises `ModelLoadFailed` when the file is not there, is something else, or does not hold what
    it says; `StorageFailed` when the disk fails.
    """
    try:
        with closing(open_regular(path)) as raw:
            return _read(path, raw)
    except BadHeader as error:
        raise told_of(path, error) from None
    except OSError as error:
        raise unreadable(path, error) from error


def read_small_file(path: Path, limit_bytes: int) -> bytes:
    """A text file that belongs to a model, whole; the same refusals as `read_weight_file`."""
    try:
        with closing(open_regular(path)) as raw:
            size = os.fstat(raw.fileno()).st_size
            if size > limit_bytes:
                raise refuse(
                    path,
                    f"has {size} bytes; at most {limit_bytes} are allowed",
                    "check that this is the file that belongs to the model",
                    expected=limit_bytes,
                    found=size,
                )
            return exactly(raw, size)
    except BadHeader as error:
        raise told_of(path, error) from None
    except OSError as error:
        raise unreadable(path, error) from error


def refuse(
    path: Path, problem: str, hint: str, *, tensor: str = "", **details: object
) -> ModelLoadFailed:
    """The error for a file of a model: names the file, the tensor, and what was compared."""
    about = f"{path}: tensor {tensor!r}: {problem}" if tensor else f"{path} {problem}"
    facts: dict[str, object] = {"path": str(path), **details}
    if tensor:
        facts["tensor"] = tensor
    return ModelLoadFailed(about, hint=hint, details=facts)


def open_regular(path: Path) -> FileIO:
    """Open a file for reading; refuses what is none. Raises `ModelLoadFailed`, `OSError`."""
    # O_NONBLOCK: a FIFO under this name must be refused, not waited on.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "directory" if stat.S_ISDIR(mode) else "special file"
        raise refuse(path, f"is a {kind}, not a file", "give the path of a weight file")
    return FileIO(descriptor, "rb")


def _read(path: Path, raw: FileIO) -> FileContents:
    identity = FileIdentity.of(os.fstat(raw.fileno()))
    size = identity.size_bytes
    head = exactly(raw, min(HEAD_BYTES, size))
    imposter = recognise(head, size)
    if imposter is not None:
        raise refuse(
            path,
            imposter.problem,
            imposter.hint,
            kind=imposter.kind,
            expected=imposter.expected_bytes,
            found=size,
        )
    length = header_length(head, size)
    raw.seek(LENGTH_BYTES)
    header = parse_header(exactly(raw, length), size)
    return _contents(IndexedFile(path, identity), header)


def _contents(file: IndexedFile, header: Header) -> FileContents:
    return FileContents(
        file=file,
        specs={tensor.spec.name: tensor.spec for tensor in header.tensors},
        starts={
            tensor.spec.name: header.data_start_bytes + tensor.start_bytes
            for tensor in header.tensors
        },
        metadata=header.metadata,
    )


def exactly(raw: FileIO, size_bytes: int) -> bytes:
    """So many bytes from where the file stands; raises `BadHeader` if it ends before."""
    pieces: list[bytes] = []
    missing = size_bytes
    while missing:
        piece = raw.read(missing)
        if not piece:
            raise BadHeader(
                f"it ended {missing} bytes early while it was read",
                expected=size_bytes,
                found=size_bytes - missing,
                truncated=True,
            )
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def told_of(path: Path, error: BadHeader, what: str = "safetensors") -> ModelLoadFailed:
    """The refusal for a file whose header is not sound; `what` is the kind of file it should be."""
    if error.truncated:
        problem, hint = f"is cut short: {error.problem}", "the download did not finish; repeat it"
        kind = "truncated"
    elif error.tensor:
        problem, hint, kind = error.problem, _DOWNLOAD_AGAIN, "bad_tensor"
        if "dtype" in error.problem:
            hint = "use a checkpoint saved in one of the dtypes that the store holds"
    else:
        problem, hint = f"is not a sound {what} file: {error.problem}", _DOWNLOAD_AGAIN
        kind = "bad_header"
    tensor = "" if error.truncated else error.tensor
    return refuse(
        path, problem, hint, tensor=tensor, kind=kind, expected=error.expected, found=error.found
    )


@contextmanager
def looking_at(path: Path) -> Iterator[None]:
    """Give what the file system says within the block a code and a sentence.

    Asking whether something is there can fail as reading can: the name is too long, or a directory
    on the way may not be searched. `path` is named where the system names none.
    """
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        raise unreadable(Path(named), error) from error


def unreadable(path: Path, error: OSError) -> ModelLoadFailed | StorageFailed:
    """What an error of the file system means for whoever wants the file."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return _missing(path)
    if error.errno in (errno.EACCES, errno.EPERM):
        return refuse(
            path,
            "may not be read by this process",
            "let the daemon's user read it (chmod, chgrp or an ACL)",
            kind="no_permission",
        )
    if error.errno == errno.ENAMETOOLONG:
        return refuse(path, "has a name that is too long for the file system", "shorten the path")
    return StorageFailed(
        f"{path} could not be read: {error.strerror}",
        hint="check the disk or the network mount that holds it",
        details={"path": str(path), "errno": error.errno},
    )


def _missing(path: Path) -> ModelLoadFailed:
    if path.is_symlink():
        target = path.readlink()
        blob = "blobs" in target.parts
        what = "the hub cache's blob" if blob else "a file"
        return refuse(
            path,
            f"is a link to {what} {target}, which is not there",
            "download the model again; the cache was cleaned or the download was broken off"
            if blob
            else "restore the file that the link points to",
            kind="dangling_link",
            expected=str(target),
        )
    return refuse(
        path, "is not there", "check the path, or download the model again", kind="missing"
    )
