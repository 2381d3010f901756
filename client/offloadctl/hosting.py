"""Commands that put models on the daemon and take them off, for those who may."""

from __future__ import annotations

from typing import Annotated

import typer

from offloadctl.common import (
    ConfigOption,
    EndpointOption,
    JsonOption,
    SettingsOption,
    common_options,
    daemon,
    with_config,
)


def load(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name to host it under.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A directory, a hub id or a single-file checkpoint; without it, a known model is "
            "loaded now.",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="auto, none, stream, model, group or sequential."),
    ] = None,
    config: ConfigOption = None,
    options: SettingsOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Host a model and wait until it is loaded."""
    from offloadctl.arguments import parse_pairs

    settings = with_config(parse_pairs(options or (), "--set"), config)
    if {"name", "source", "timeout_s"} & settings.keys():
        raise typer.BadParameter("name and source are no keys to set here", param_hint="--set")
    if offload is not None:
        parameters = settings.get("offload", {})
        if not isinstance(parameters, dict) or "mode" in parameters:
            raise typer.BadParameter("the mode is given twice", param_hint="--offload")
        settings["offload"] = {**parameters, "mode": offload} if parameters else offload
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        model = client.load(name, source, **settings)
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        output.print_json(plain(model))
    else:
        output.print_tables(tables.models_tables([model]))


def unload(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a model out of memory."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        client.unload(name)
    from offloadctl import output

    output.print_answer({"unloaded": name}, f"unloaded {name}", as_json=common.as_json)


def pin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model and keep it in memory."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        model = client.pin(name)
    from offload_protocol.codec import plain
    from offloadctl import output

    output.print_answer(plain(model), f"pinned {name}", as_json=common.as_json)


def unpin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pinned model leave memory as any other."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        model = client.unpin(name)
    from offload_protocol.codec import plain
    from offloadctl import output

    output.print_answer(plain(model), f"unpinned {name}", as_json=common.as_json)


def drain(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """Let the daemon take no new jobs, and wait until the last one has ended."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        client.drain()
    from offloadctl import output

    output.print_answer(
        {"drained": True},
        "drained: no job is left, and no new one is taken",
        as_json=common.as_json,
    )
