"""What a failed load costs: jobs on the model are refused for a while, longer each time in a row.

Who asks for the load itself has put something right, and is not kept waiting.
"""

from __future__ import annotations

from offload_protocol import codec
from offload_protocol.errors import ErrorCode
from offload_protocol.records import ErrorInfo
from offloadd.control.models.hosted_model import HostedModel

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
"""How long jobs on a model are refused after its loading failed: at first, and at most."""


def note_failure(model: HostedModel, error: ErrorInfo, now_s: float) -> None:
    """A load has failed; one that was called off counts as no failure."""
    model.error, model.is_loading, model.loaded = error, False, None
    if error.code != ErrorCode.CANCELLED:
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(model.failures, 30), LONGEST_PAUSE_S)
        model.failures += 1
        model.retry_at_s = now_s + pause_s


def check_pause(model: HostedModel, now_s: float) -> None:
    """Raise why a model cannot be loaded, for a while after that failed."""
    wait_s = model.retry_at_s - now_s
    if model.error is not None and wait_s > 0:
        error = codec.to_exception(model.error)
        hint = f"loading is tried again in {wait_s:.0f} s, or at once by `offloadctl load`"
        raise type(error)(
            error.message, hint=hint, details={**error.details, "retry_after_s": wait_s}
        )
