"""The process that plans a model before it is loaded: an order on standard input, one answer out.

A process of its own, so that neither the control plane imports torch for it nor a worker's turn
waits for modules to be built. Promises: whatever happens, one JSON object is all that is written to
standard output.
"""

from __future__ import annotations

import os
import sys

import msgspec

from offload_protocol.codec import error_info
from offload_protocol.errors import InternalError, OffloadError
from offloadd.channel.forecasts import ForecastAnswer, ForecastOrder


def main() -> None:
    """Answer one order; the exit code is 0 whenever an answer was written."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ForecastOrder)
    with os.fdopen(answers, "wb") as out:
        out.write(msgspec.json.encode(_answer(order)))


def _answer(order: ForecastOrder) -> ForecastAnswer:
    # torch is imported here, so that a message that makes no sense costs nothing.
    from offloadd.hosting.planning.forecast import forecast

    try:
        return ForecastAnswer(forecast=forecast(order))
    except OffloadError as error:
        return ForecastAnswer(error=error_info(error))
    except (ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        # A configuration that a library's constructor stumbles over; loading would as well.
        told = InternalError(f"the model cannot be planned: {type(error).__name__}: {error}")
        return ForecastAnswer(error=error_info(told))


if __name__ == "__main__":
    main()
