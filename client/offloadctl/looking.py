"""Commands that show what the daemon holds and does, and change nothing."""

from __future__ import annotations

import typer

from offloadctl.common import EndpointOption, JsonOption, common_options, daemon


def stats(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """Show what the daemon holds and does."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        data = client.stats()
    from offloadctl import output, tables

    if common.as_json:
        output.print_json(data)
    else:
        output.print_tables(tables.stats_tables(data))


def ps(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """Show where the models' bytes are, and what runs now."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        models, jobs = client.models(), client.jobs()
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        running = [job for job in jobs if job.state in tables.RUNNING_STATES]
        output.print_json(
            {"models": [plain(model) for model in models], "running": [plain(j) for j in running]}
        )
    else:
        output.print_tables(tables.ps_tables(models, jobs))


def jobs(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """List the jobs."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        rows = client.jobs()
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        output.print_json({"jobs": [plain(row) for row in rows]})
    else:
        output.print_tables([tables.jobs_table(rows)])


def models(
    ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False
) -> None:
    """List the hosted models."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        rows = client.models()
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        output.print_json({"models": [plain(row) for row in rows]})
    else:
        output.print_tables(tables.models_tables(rows))
