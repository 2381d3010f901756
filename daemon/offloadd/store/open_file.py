"""An open weight file: direct I/O where the file system has it, and never bytes of another state.

The descriptor stays open as long as anybody holds this object, so a file that is renamed away,
deleted or replaced by a newer download goes on giving the bytes that were indexed (`is_stale`
says so). What writes into the file itself (an overwrite in place, a truncation) is noticed after
each read, before the bytes are used, and fails with `StorageFailed`. Weight files are never
mapped: a mapping of a file that shrinks kills the process.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from offload_protocol.errors import StorageFailed
from offloadd.store.index import FileIdentity, IndexedFile
from offloadd.store.scatter import BUFFERED, Alignment

ReadCall = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv` or what stands in for a failing disk: (descriptor, buffers, file offset) -> bytes."""

_BLOCKS = (512, 4096)
_MEMORY = (4, 64, 512, 4096)
_SMALLEST_IN_PLACE_BYTES = 64 * 1024
_PROBE_BYTES = 2 * 4096
_LOAD_AGAIN = "load the model again, so that its files are checked afresh"


class OpenFile:
    """One state of one file, readable from any thread."""

    def __init__(
        self, file: IndexedFile, *, direct: bool = True, read_call: ReadCall = os.preadv
    ) -> None:
        """Open the file as it was indexed. Raises `StorageFailed` if it is gone or has changed."""
        self.path = file.path
        self._accepted = file.identity
        self._read_call = read_call
        self._led_here = True
        self._accepting = threading.Lock()
        self._descriptor = self._open()
        # A reader may still be inside a read when the owner lets go: the last holder closes.
        weakref.finalize(self, os.close, self._descriptor)
        found = FileIdentity.of(os.fstat(self._descriptor))
        if not found.same_state(file.identity):
            raise self._changed(found, "is no longer the file that was indexed")
        self.alignment = probe_alignment(self._descriptor) if direct else BUFFERED

    @property
    def is_direct(self) -> bool:
        return self.alignment is not BUFFERED

    @property
    def is_stale(self) -> bool:
        """Whether the path now leads elsewhere (a newer download) or nowhere."""
        return not self._path_leads_here()

    def read(self, buffers: Sequence[memoryview], start_bytes: int, needed_bytes: int) -> None:
        """Fill the buffers from the file's offset; at least `needed_bytes` of them in order.

        `start_bytes` and the buffers fit `alignment`; what lies past the file's end stays as it
        is. Raises `StorageFailed` for an I/O error, an early end, or a file that was written to.
        """
        block = self.alignment.block_bytes
        done = 0
        while done < needed_bytes:
            got = self._read_once(_skip(buffers, done), start_bytes + done)
            if done + got >= needed_bytes:
                break
            # A direct read has to go on from a block border.
            onward = (done + got) // block * block
            if onward <= done:
                self.check_unchanged()
                raise self._short(start_bytes + needed_bytes, start_bytes + done + got)
            done = onward
        self.check_unchanged()
        if not self.is_direct:
            size = sum(len(buffer) for buffer in buffers)
            os.posix_fadvise(self._descriptor, start_bytes, size, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise `StorageFailed` if the file was, or may have been, written to since it was indexed.

        A change time that moved alone is accepted where a link, owner or mode change or a rename
        explains it. What nothing explains may be an overwrite whose author put the modification
        time back, so it is refused.
        """
        found = FileIdentity.of(os.fstat(self._descriptor))
        if found.same_state(self._accepted):
            return
        if not found.same_content_clock(self._accepted):
            raise self._changed(found, "was written to while it was in use")
        # Two threads that meet the same harmless change must not take the second look at it for
        # a change of its own.
        with self._accepting:
            if not found.same_state(self._accepted):
                self._accept(found)

    def _accept(self, found: FileIdentity) -> None:
        leads_here = self._path_leads_here()
        renamed = not leads_here or leads_here != self._led_here
        if not renamed and not found.relabelled(self._accepted):
            raise self._changed(found, "may have been written to while it was in use")
        self._led_here = leads_here
        self._accepted = found

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._failed("could not be opened", error) from error

    def _read_once(self, buffers: list[memoryview], start_bytes: int) -> int:
        try:
            return self._read_call(self._descriptor, buffers, start_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise self._failed(f"could not be read at byte {start_bytes}", error) from error
        self._give_up_direct()
        try:
            return self._read_call(self._descriptor, buffers, start_bytes)
        except OSError as error:
            raise self._failed(f"could not be read at byte {start_bytes}", error) from error

    def _give_up_direct(self) -> None:
        # Reads under way in other threads stay right: a buffered read takes any alignment.
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.alignment = BUFFERED

    def _path_leads_here(self) -> bool:
        try:
            return FileIdentity.of(self.path.stat()).same_file(self._accepted)
        except OSError:
            return False

    def _failed(self, what: str, error: OSError) -> StorageFailed:
        return StorageFailed(
            f"{self.path} {what}: {error.strerror}",
            hint="check the disk or the network mount that holds it, then " + _LOAD_AGAIN,
            details={"path": str(self.path), "errno": error.errno},
        )

    def _short(self, expected: int, found: int) -> StorageFailed:
        return StorageFailed(
            f"{self.path} ended early: byte {expected} was expected, it ends at {found}",
            hint="the file was cut while it was in use; download it again and " + _LOAD_AGAIN,
            details={"path": str(self.path), "expected": expected, "found": found},
        )

    def _changed(self, found: FileIdentity, what: str) -> StorageFailed:
        before = self._accepted
        sizes = (
            f" (it had {before.size_bytes} bytes, it has {found.size_bytes})"
            if before.size_bytes != found.size_bytes
            else ""
        )
        return StorageFailed(
            f"{self.path} {what}{sizes}",
            hint=_LOAD_AGAIN,
            details={
                "path": str(self.path),
                "expected": _facts(before),
                "found": _facts(found),
            },
        )


def probe_alignment(descriptor: int) -> Alignment:
    """Switch the descriptor to direct I/O and find out by trying what it asks of reads.

    Leaves the descriptor buffered, and says so, where the file system has no direct I/O or the
    file is too small to gain from it.
    """
    if os.fstat(descriptor).st_size < 2 * _PROBE_BYTES:
        return BUFFERED
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return BUFFERED
    with mmap.mmap(-1, 2 * _PROBE_BYTES) as memory, memoryview(memory) as view:
        block = next((size for size in _BLOCKS if _takes(descriptor, view[:size], size)), 0)
        # Two pages, so that a buffer which the device must see as two pieces is really tried.
        place = next(
            (at for at in _MEMORY if _takes(descriptor, view[at : at + _PROBE_BYTES], 4096)), 0
        )
    if block and place:
        return Alignment(block, place, _SMALLEST_IN_PLACE_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return BUFFERED


def _takes(descriptor: int, view: memoryview, offset_bytes: int) -> bool:
    with view:
        try:
            return os.preadv(descriptor, [view], offset_bytes) == len(view)
        except OSError:
            return False


def _skip(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for buffer in buffers:
        if done_bytes < len(buffer):
            rest.append(buffer[done_bytes:])
        done_bytes = max(done_bytes - len(buffer), 0)
    return rest


def _facts(identity: FileIdentity) -> dict[str, int]:
    return {
        "inode": identity.inode,
        "size_bytes": identity.size_bytes,
        "mtime_ns": identity.mtime_ns,
        "ctime_ns": identity.ctime_ns,
    }
