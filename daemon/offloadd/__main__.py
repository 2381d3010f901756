"""The command `offloadd`: reads the command line and starts the daemon."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

NEEDED = ("pydantic", "torch", "diffusers", "transformers", "accelerate", "safetensors", "psutil")
"""What the extra `[daemon]` brings; looked for, and imported only where it is used."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the daemon; ends the process with its exit code."""
    options = parse(arguments)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"offloadd: {missing[0]} is not installed; the daemon needs: "
            "pip install 'offloadd[daemon]'",
            file=sys.stderr,
        )
        sys.exit(1)
    from offloadd.control.main import run

    try:
        sys.exit(run(options, os.environ))
    except KeyboardInterrupt:
        # Before the event loop took over the signals.
        sys.exit(130)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with exit code 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="offloadd",
        description="Owns an accelerator and shares it between programs that draw with diffusers.",
        epilog="Every setting: offloadd --print-config",
    )
    parser.add_argument("--config", metavar="FILE", help="configuration to read, in TOML")
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="where clients connect: ipc://PATH, with keys tcp://HOST:PORT",
    )
    parser.add_argument("--device", metavar="auto|cpu|cuda:N", help="what to compute on")
    parser.add_argument("--state-dir", metavar="DIR", help="the workers' directory")
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting, and how to set it"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    return parser.parse_args(arguments)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from importlib.metadata import version

        print(f"offloadd {version('offloadd')}")
        parser.exit()


if __name__ == "__main__":
    main()
