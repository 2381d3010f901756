"""The command that says what a model would take before it is loaded."""

from __future__ import annotations

from pathlib import Path
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


def plan(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory, a hub id, a single-file checkpoint, or a hosted model's name.",
        ),
    ],
    device_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What its weights may take of the device, as 8GiB."),
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the store may take of host memory.")
    ] = None,
    config: ConfigOption = None,
    options: SettingsOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, as PNG or what the name says.")
    ] = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what hosting a model would take and cost, without loading it."""
    from offloadctl.arguments import parse_pairs

    settings = with_config(parse_pairs(options or (), "--set"), config)
    if {"source", "name", "device_budget", "host_budget", "timeout_s"} & settings.keys():
        raise typer.BadParameter("this has an option of its own", param_hint="--set")
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        forecast = client.plan(
            source, device_budget=device_budget, host_budget=host_budget, **settings
        )
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if plot is not None:
        from offloadctl.plan_picture import draw_plan

        draw_plan(forecast, plot)
    if common.as_json:
        output.print_json(plain(forecast))
    else:
        output.print_tables(tables.forecast_tables(forecast))
