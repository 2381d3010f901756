"""The commands of `offloadctl`: each asks the daemon one thing and shows the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Common:
    """Options that may stand before or behind the command."""

    endpoint: str | None
    as_json: bool


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
    ctx.obj = Common(endpoint, as_json)


@contextmanager
def _daemon(common: Common) -> Iterator[Any]:
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
    with Client(common.endpoint, program="offloadctl") as client:
        yield client


def _common(ctx: typer.Context, endpoint: str | None, as_json: bool) -> Common:
    before: Common = ctx.obj
    return Common(endpoint or before.endpoint, as_json or before.as_json)


@app.command()
def stats(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """Show what the daemon holds and does."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        data = client.stats()
    from offloadctl import output, tables

    if common.as_json:
        output.print_json(data)
    else:
        output.print_tables(tables.stats_tables(data))


@app.command()
def ps(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """Show where the models' bytes are, and what runs now."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
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


@app.command()
def jobs(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """List the jobs."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        rows = client.jobs()
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        output.print_json({"jobs": [plain(row) for row in rows]})
    else:
        output.print_tables([tables.jobs_table(rows)])


@app.command()
def models(
    ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False
) -> None:
    """List the hosted models."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        rows = client.models()
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        output.print_json({"models": [plain(row) for row in rows]})
    else:
        output.print_tables([tables.models_table(rows)])


@app.command()
def load(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name to host it under.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A directory or a hub id; without it, a known model is loaded now.",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="auto, none, stream, model, group or sequential."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any key of a [[models]] entry; may be repeated."
        ),
    ] = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Host a model and wait until it is loaded."""
    from offloadctl.arguments import parse_pairs

    settings = parse_pairs(options or (), "--set")
    if {"name", "source", "timeout_s"} & settings.keys():
        raise typer.BadParameter("name and source are no keys to set here", param_hint="--set")
    if offload is not None:
        parameters = settings.get("offload", {})
        if not isinstance(parameters, dict) or "mode" in parameters:
            raise typer.BadParameter("the mode is given twice", param_hint="--offload")
        settings["offload"] = {**parameters, "mode": offload} if parameters else offload
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        model = client.load(name, source, **settings)
    from offload_protocol.codec import plain
    from offloadctl import output, tables

    if common.as_json:
        output.print_json(plain(model))
    else:
        output.print_tables([tables.models_table([model])])


@app.command()
def unload(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a model out of memory."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        client.unload(name)
    from offloadctl import output

    if common.as_json:
        output.print_json({"unloaded": name})
    else:
        output.print_line(f"unloaded {name}")


@app.command()
def pin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model and keep it in memory."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        model = client.pin(name)
    from offload_protocol.codec import plain
    from offloadctl import output

    if common.as_json:
        output.print_json(plain(model))
    else:
        output.print_line(f"pinned {name}")


@app.command()
def unpin(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pinned model leave memory as any other."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        model = client.unpin(name)
    from offload_protocol.codec import plain
    from offloadctl import output

    if common.as_json:
        output.print_json(plain(model))
    else:
        output.print_line(f"unpinned {name}")


@app.command()
def drain(ctx: typer.Context, endpoint: EndpointOption = None, as_json: JsonOption = False) -> None:
    """Let the daemon take no new jobs, and wait until the last one has ended."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        client.drain()
    from offloadctl import output

    if common.as_json:
        output.print_json({"drained": True})
    else:
        output.print_line("drained: no job is left, and no new one is taken")


@app.command()
def cancel(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `jobs` shows it.")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a job, whether it waits or runs."""
    common = _common(ctx, endpoint, as_json)
    with _daemon(common) as client:
        state = client.cancel(job)
    from offloadctl import output

    if common.as_json:
        output.print_json({"job": job, "state": state})
    else:
        output.print_line(f"{job} {state}")


@app.command()
def generate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hosted model's name.")],
    file: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Picture to write; - is standard output."
        ),
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to draw.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same picture.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of denoising steps.")] = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="Size in pixels.")] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="KEY=VALUE", help="Any argument of the pipeline; may be repeated."
        ),
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Cancel after this time, such as 90s.")
    ] = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a picture and write it to a file; Ctrl-C cancels the job."""
    from offload_client import Client
    from offloadctl import arguments as reading
    from offloadctl import output
    from offloadctl.pictures import write_pictures
    from offloadctl.progress import progress_bar

    common = _common(ctx, endpoint, as_json)
    named = reading.pipeline_arguments(arguments or (), steps, size, Client.generate)
    timeout_s = reading.parse_timeout(timeout)
    reading.check_output(file, as_json=common.as_json, stdout_is_terminal=sys.stdout.isatty())
    with _daemon(common) as client:
        with progress_bar() as on_progress:
            result = client.generate(
                model,
                prompt,
                seed=seed,
                on_progress=on_progress,
                timeout_s=timeout_s,
                priority=priority,
                **named,
            )
        files = write_pictures(result.images, file)
    if common.as_json:
        output.print_json(output.result_data(result, files))
    else:
        # Standard output may carry the picture, so words go to standard error.
        sys.stderr.write(output.result_line(result, files) + "\n")
