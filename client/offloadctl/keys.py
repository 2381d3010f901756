"""The command that makes keys for connections by tcp; it needs no daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offloadctl.common import JsonOption, common_options


def keygen(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="Whose key it is; `server` for a daemon."),
    ] = "client",
    directory: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where to write [default: ~/.config/offloadd]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a pair of keys: NAME.key to keep, NAME.pub to give away."""
    import os

    import zmq

    from offload_protocol.keys import KeyPair, config_directory, write_pair
    from offloadctl import output

    common = common_options(ctx, None, as_json)
    public, secret = (half.decode() for half in zmq.curve_keypair())
    place = Path(directory) if directory is not None else config_directory(os.environ)
    kept, given = write_pair(KeyPair(public, secret), place, name)
    if common.as_json:
        output.print_json({"public": public, "key_file": str(kept), "public_file": str(given)})
    else:
        output.print_line(f"{kept} is yours to keep")
        output.print_line(f"{given} is to be given away: {public}")
