"""From whatever a pipeline raises to a coded error, and the faults that no process survives.

An exception holds, through its traceback, every tensor of the frames it passed; what is made here
holds only text, so that the memory goes back as soon as the exception is dropped.
"""

from __future__ import annotations

import errno
import re
import traceback
from types import TracebackType

import torch

from offload_protocol.errors import (
    InternalError,
    InvalidRequest,
    ModelLoadFailed,
    OffloadError,
    OutOfMemory,
    StorageFailed,
)
from offload_protocol.sizes import format_size

_CPU_OUT_OF_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_CUDA_NEEDED = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_UNITS_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_STICKY = re.compile(
    r"CUDA error|HIP error|device-side assert|illegal memory access|unspecified launch failure"
    r"|CUDNN_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_EXECUTION_FAILED"
)
_SHAPES = re.compile(
    r"shape|size of tensor|dimension|mat1 and mat2|expected input|expected \dD", re.IGNORECASE
)
_PIPELINE_CODE = re.compile(r"/diffusers/(pipelines/|image_processor|video_processor)")
_LIBRARY_CODE = re.compile(r"/(diffusers|transformers)/")
_ABOUT_A_FILE = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
)
"""What is wrong with one file, where the disk itself is well."""

_CLUMSY = (TypeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError)


def is_device_fault(error: BaseException) -> bool:
    """Whether the device's context is poisoned, so that only a new process can go on.

    Out of memory is not: the allocator refuses before anything is launched.
    """
    if isinstance(error, torch.OutOfMemoryError) or _is_cuda_alloc_failure(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _STICKY.search(str(error)) is not None
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation on the device or the host was refused."""
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or _CPU_OUT_OF_MEMORY.search(str(error)) is not None
        or _is_cuda_alloc_failure(error)
    )


def to_offload_error(
    error: Exception, free_bytes: int, device: str, plan: str = "", *, loads: bool = False
) -> OffloadError:
    """The coded error for an exception from a pipeline; `free_bytes` is the device's, now.

    `plan` says in words what the device's memory is planned for. While a model `loads`, a file that
    cannot be opened is a fault of the model; later its weights are what has gone.
    """
    if isinstance(error, OffloadError):
        return error
    if is_out_of_memory(error):
        return _out_of_memory(error, free_bytes, device, plan)
    if loads and isinstance(error, OSError) and error.errno in _ABOUT_A_FILE:
        return ModelLoadFailed(
            f"a file of the model cannot be opened: {sentence(error)}",
            hint="the download did not finish, or the daemon's user may not read the file",
        )
    if isinstance(error, OSError):
        return StorageFailed(f"reading weights failed: {sentence(error)}")
    if _is_about_arguments(error):
        return InvalidRequest(
            f"the pipeline refused the arguments: {sentence(error)}",
            hint="the sentence is the pipeline's own; see its documentation",
        )
    return InternalError(
        f"the pipeline failed with {type(error).__name__}: {sentence(error)}",
        hint="the daemon's log has the trace",
    )


def sentence(error: BaseException) -> str:
    """The exception's text as one line of at most 500 characters."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _out_of_memory(error: BaseException, free_bytes: int, device: str, plan: str) -> OutOfMemory:
    needed = _needed_bytes(str(error))
    asked = f" while {format_size(needed)} more were asked for" if needed else ""
    told = f"{device} ran out of memory{asked}; {format_size(free_bytes)} are free now"
    return OutOfMemory(
        f"{told}\n{plan}".rstrip(),
        hint="draw smaller or fewer pictures, or give the model a smaller device_budget",
        details={"needed_bytes": needed, "free_bytes": free_bytes, "device": device},
    )


def _needed_bytes(text: str) -> int:
    if match := _CPU_OUT_OF_MEMORY.search(text):
        return int(match[1])
    if match := _CUDA_NEEDED.search(text):
        return int(float(match[1]) * _UNITS_BYTES.get(match[2], 0))
    return 0


def _is_cuda_alloc_failure(error: BaseException) -> bool:
    return "CUBLAS_STATUS_ALLOC_FAILED" in str(error) or "CUDA error: out of memory" in str(error)


def _is_about_arguments(error: Exception) -> bool:
    # Both libraries complain about their callers by ValueError. A pipeline's own code also trips
    # over arguments in clumsier ways; deeper down, those may be anybody's fault.
    if isinstance(error, ValueError):
        return _was_raised_in(_LIBRARY_CODE, error.__traceback__)
    if isinstance(error, RuntimeError) and _SHAPES.search(str(error)) is not None:
        return True
    return isinstance(error, _CLUMSY) and _was_raised_in(_PIPELINE_CODE, error.__traceback__)


def _was_raised_in(code: re.Pattern[str], trace: TracebackType | None) -> bool:
    frames = traceback.extract_tb(trace)
    return bool(frames) and code.search(frames[-1].filename) is not None
