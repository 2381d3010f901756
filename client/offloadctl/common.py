"""What the commands of `offloadctl` share: the program itself, its options, its connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="offloadctl",
    help="Look at a running offloadd daemon, host models on it, and draw.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

EndpointOption = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="URL", help="ipc:///path or tcp://HOST:PORT of the daemon."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key of a [[models]] entry; may be repeated."
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="DIR|HUB_ID",
        help="Where the configurations of a single-file checkpoint are, in diffusers' form.",
    ),
]


def with_config(settings: dict[str, Any], config: str | None) -> dict[str, Any]:
    """A model's settings with what `--config` says."""
    if config is None:
        return settings
    if "config" in settings:
        raise typer.BadParameter("this is given twice", param_hint="--config")
    return {**settings, "config": config}


@dataclass(frozen=True, slots=True)
class Common:
    """Options that may stand before or behind the command."""

    endpoint: str | None
    as_json: bool
    key_file: str | None = None
    server_key: str | None = None


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"offloadctl {version('offloadd')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For tcp: your own key [~/.config/offloadd/client.key]."),
    ] = None,
    server_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY|FILE", help="For tcp: the daemon's [~/.config/offloadd/server.pub]."
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look at a running offloadd daemon, host models on it, and draw.

    Exit status: 0 done, 1 the daemon refused or failed, 2 wrong usage, 3 no daemon reached.
    """
    ctx.obj = Common(endpoint, as_json, key_file, server_key)


@contextmanager
def daemon(common: Common) -> Iterator[Any]:
    """A client for the options given; the endpoint is checked before anything is loaded."""
    import os

    from offload_client import Client
    from offload_protocol.endpoints import client_endpoint
    from offload_protocol.errors import InvalidRequest

    try:
        client_endpoint(common.endpoint, os.environ)
    except InvalidRequest as error:
        origin = "--endpoint" if common.endpoint else "OFFLOADD_ENDPOINT"
        raise typer.BadParameter(str(error), param_hint=origin) from None
    with Client(
        common.endpoint,
        program="offloadctl",
        key_file=common.key_file,
        server_key=common.server_key,
    ) as client:
        yield client


def common_options(ctx: typer.Context, endpoint: str | None, as_json: bool) -> Common:
    """What is said behind the command goes before what is said before it."""
    before: Common = ctx.obj
    return replace(before, endpoint=endpoint or before.endpoint, as_json=as_json or before.as_json)
