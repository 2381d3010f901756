"""Segments of host memory as the kernel has them: memfds of exact size that cannot change size.

A mapping of one never meets an end of file, so whoever holds it cannot be killed by another's
truncation.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def create(name: str, size_bytes: int) -> int:
    """A descriptor of new memory; its pages come when they are touched. Raises `OSError`."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int, size_bytes: int) -> bool:
    """Whether a descriptor from elsewhere is such a memfd of that size."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & _SIZE_SEALS == _SIZE_SEALS and os.fstat(descriptor).st_size == size_bytes


def held_bytes(descriptor: int) -> int:
    """How much memory its pages take now."""
    return os.fstat(descriptor).st_blocks * 512


def punch_out(descriptor: int) -> None:
    """Give all its pages back, whoever else still has the memfd. Raises `OSError`.

    Releases the interpreter lock, and takes up to a tenth of a second for 256 MiB.
    """
    size = os.fstat(descriptor).st_size
    while size and _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, size):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
