"""Error codes and the exception tree: every refusal has a code, a sentence and a hint.

The same classes are raised by the daemon, the worker and the client, so that an error reads the
same wherever it is caught. The tree:

    OffloadError
     ├─ InvalidRequest     UnknownModel    UnknownJob     IdConflict
     ├─ ModelLoadFailed    StorageFailed   OutOfMemory    WorkerCrashed
     ├─ Busy               DeadlineExceeded               Cancelled      ShuttingDown
     ├─ ProtocolMismatch   TooLarge        Unauthorized   InternalError
     └─ Unreachable        TimedOut        (raised only on the client's side)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar


class ErrorCode(StrEnum):
    """What went wrong, as a word that programs may branch on; stable between versions."""

    INVALID_REQUEST = "invalid_request"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_JOB = "unknown_job"
    ID_CONFLICT = "id_conflict"
    MODEL_LOAD_FAILED = "model_load_failed"
    BUSY = "busy"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_CRASHED = "worker_crashed"
    STORAGE_FAILED = "storage_failed"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"


class OffloadError(Exception):
    """Base of all errors of this project.

    `message` says what happened, `hint` what to do about it (may be empty), and `details` holds
    plain data for programs: paths, sizes in bytes, seconds to wait.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    def __init__(
        self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with `args` alone and lose hint and details.
        return from_code, (self.code.value, self.message, self.hint, self.details)


class InvalidRequest(OffloadError):
    """The request can never succeed as it was said."""

    code = ErrorCode.INVALID_REQUEST


class UnknownModel(OffloadError):
    """No hosted model has that name."""

    code = ErrorCode.UNKNOWN_MODEL


class UnknownJob(OffloadError):
    """No job of this client has that id."""

    code = ErrorCode.UNKNOWN_JOB


class IdConflict(OffloadError):
    """The job id was already used for a different request."""

    code = ErrorCode.ID_CONFLICT


class ModelLoadFailed(OffloadError):
    """The model's source cannot be hosted; the message names what is wrong with it."""

    code = ErrorCode.MODEL_LOAD_FAILED


class Busy(OffloadError):
    """The queue is full; `details["retry_after_s"]` says when to ask again."""

    code = ErrorCode.BUSY


class DeadlineExceeded(OffloadError):
    """The job's own deadline passed before it was done."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(OffloadError):
    """The job was cancelled."""

    code = ErrorCode.CANCELLED


class OutOfMemory(OffloadError):
    """The device or the host has not enough memory for the job."""

    code = ErrorCode.OUT_OF_MEMORY


class WorkerCrashed(OffloadError):
    """The process that owns the device died while the job ran."""

    code = ErrorCode.WORKER_CRASHED


class StorageFailed(OffloadError):
    """A disk read or write failed, or a file changed while it was in use."""

    code = ErrorCode.STORAGE_FAILED


class ProtocolMismatch(OffloadError):
    """Client and daemon do not speak the same protocol version."""

    code = ErrorCode.PROTOCOL_MISMATCH


class TooLarge(OffloadError):
    """The request is over one of the limits that the daemon announces."""

    code = ErrorCode.TOO_LARGE


class Unauthorized(OffloadError):
    """The operation needs a role that this client does not have."""

    code = ErrorCode.UNAUTHORIZED


class ShuttingDown(OffloadError):
    """The daemon is stopping and takes no new work."""

    code = ErrorCode.SHUTTING_DOWN


class InternalError(OffloadError):
    """A fault of offloadd itself; the daemon's log has the trace."""

    code = ErrorCode.INTERNAL


class Unreachable(OffloadError):
    """No daemon answers at any endpoint that was tried."""

    code = ErrorCode.UNREACHABLE


class TimedOut(OffloadError):
    """The daemon did not answer within the client's own time limit."""

    code = ErrorCode.TIMEOUT


_CLASSES: dict[str, type[OffloadError]] = {
    error.code.value: error for error in OffloadError.__subclasses__()
}


def from_code(
    code: str, message: str, hint: str = "", details: Mapping[str, Any] | None = None
) -> OffloadError:
    """Rebuild the exception that a code stands for; an unknown code gives a plain OffloadError."""
    return _CLASSES.get(code, OffloadError)(message, hint=hint, details=details)
