"""A range of addresses in which an extent's segments are mapped side by side.

So the extent is one contiguous view however many memfds hold it. The range stays reserved until
this object and the last view of it are gone; places without a segment fault, so whoever vacates one
has made sure that nobody computes on it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

from offload_protocol.errors import OutOfMemory
from offloadd.store.layout import align

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mprotect = _libc.mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Reservation:
    """`size_bytes` of addresses, page-aligned; offsets and sizes of segments are whole pages."""

    def __init__(self, size_bytes: int, on_last_view: Callable[[], None] = lambda: None) -> None:
        """`on_last_view` is called, in any thread, when no view is left; it must not block.

        Raises `OutOfMemory` where the address space is limited.
        """
        self.size_bytes = align(max(size_bytes, 1), mmap.PAGESIZE)
        self._on_last_view = on_last_view
        self._span: weakref.ref[ctypes.Array[ctypes.c_char]] | None = None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = self._map(None, self.size_bytes, _PROT_NONE, flags, -1)
        weakref.finalize(self, _munmap, self.address, self.size_bytes)

    def place(self, offset_bytes: int, size_bytes: int, descriptor: int, *, writable: bool) -> None:
        """Map a segment there, in one step, instead of whatever was there; raises `OutOfMemory`."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        self._map(self.address + offset_bytes, size_bytes, protection, flags, descriptor)

    def protect(self, offset_bytes: int, size_bytes: int) -> None:
        """From now on the bytes can only be read; a stray write kills the process instead."""
        if _mprotect(self.address + offset_bytes, size_bytes, mmap.PROT_READ):
            raise _no_memory(size_bytes)

    def vacate(self, offset_bytes: int, size_bytes: int) -> None:
        """Unmap what is there; the addresses stay reserved."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._map(self.address + offset_bytes, size_bytes, _PROT_NONE, flags, -1)

    def view(self, size_bytes: int) -> memoryview:
        """A read-only view of the first bytes, for users whom `has_views` is to count."""
        span = self._span() if self._span is not None else None
        if span is None:
            span = self._new_span()
            self._span = weakref.ref(span)
            weakref.finalize(span, self._on_last_view)
        return memoryview(span).cast("B")[:size_bytes].toreadonly()

    @property
    def has_views(self) -> bool:
        """Whether anybody still holds a view or a part of one."""
        return self._span is not None and self._span() is not None

    def writable(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """A view for the store's own use, which does not count."""
        return memoryview(self._new_span()).cast("B")[start_bytes:stop_bytes]

    def equals(self, offset_bytes: int, size_bytes: int, other: Reservation) -> bool:
        """Whether the bytes there are those at the start of another range. Releases the GIL."""
        return not _memcmp(self.address + offset_bytes, other.address, size_bytes)

    def _new_span(self) -> ctypes.Array[ctypes.c_char]:
        span = (ctypes.c_char * self.size_bytes).from_address(self.address)
        # The span knows an address only; as long as it lives, the range must.
        span.__dict__["reservation"] = self
        return span

    def _map(
        self, address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int
    ) -> int:
        found = _mmap(address, size_bytes, protection, flags, descriptor, 0)
        if found is None or found == _FAILED:
            raise _no_memory(size_bytes)
        return int(found)


def _no_memory(size_bytes: int) -> OutOfMemory:
    code = ctypes.get_errno()
    return OutOfMemory(
        f"no room for {size_bytes} bytes of weights in this process: {os.strerror(code)}",
        hint="raise the limit on address space or mappings (ulimit -v, vm.max_map_count)",
        details={"size_bytes": size_bytes, "errno": code},
    )
