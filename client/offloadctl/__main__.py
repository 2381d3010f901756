"""Runs `offloadctl` and turns every outcome into its exit status.

0 done, 1 the daemon refused or failed, 2 wrong usage, 3 no daemon reached, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from offloadctl.app import app

DONE, FAILED, WRONG_USAGE, NOT_REACHED, INTERRUPTED = 0, 1, 2, 3, 130

# typer carries a click of its own in some versions and imports it in others, so its base of all
# usage errors is found by inheritance.
UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> NoReturn:
    """The console script."""
    _fill_closed_streams()
    sys.exit(run(sys.argv[1:]))


def _fill_closed_streams() -> None:
    # Who closes a stream (`>&-`) wants no words; its number must not go to a socket.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: PTH123, SIM115


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    as_json = "--json" in argv
    command = typer.main.get_command(app)
    try:
        status = command.main(list(argv), prog_name="offloadctl", standalone_mode=False)
        return status if isinstance(status, int) else DONE
    except UsageError as error:
        return _wrong_usage(error, as_json)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        from offload_protocol.errors import OffloadError

        if not isinstance(error, OffloadError):
            raise
        return _failed(error, as_json)


def _wrong_usage(error: Any, as_json: bool) -> int:
    if as_json:
        from offloadctl import output

        hint = "offloadctl --help shows how it is used"
        output.print_json(output.error_data("invalid_request", error.format_message(), hint))
    else:
        error.show()
    return WRONG_USAGE


def _failed(error: Any, as_json: bool) -> int:
    from offload_protocol.errors import Unreachable
    from offloadctl import output

    if as_json:
        output.print_json(
            output.error_data(error.code.value, error.message, error.hint, error.details)
        )
    else:
        output.print_error(error)
    return NOT_REACHED if isinstance(error, Unreachable) else FAILED


if __name__ == "__main__":
    main()
