"""Commands about one job: draw, fetch and cancel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offloadctl.common import Common, EndpointOption, JsonOption, common_options, daemon

if TYPE_CHECKING:
    from offload_client import Result

OutputOption = Annotated[
    str | None,
    typer.Option("-o", "--output", metavar="FILE", help="Picture to write; - is standard output."),
]
TimeoutOption = Annotated[
    str | None, typer.Option(metavar="DURATION", help="How long to wait, such as 90s.")
]


def generate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hosted model's name.")],
    file: OutputOption = None,
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
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="NAME[:WEIGHT]", help="An adapter of the model; may be repeated."
        ),
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    timeout: TimeoutOption = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="How long the model stays in memory afterwards: 5m, 0 or forever.",
        ),
    ] = None,
    detached: Annotated[
        bool, typer.Option("--detached", help="Only queue it, and print its id for `fetch`.")
    ] = False,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a picture and write it to a file; Ctrl-C cancels the job, unless it is detached."""
    from offload_client import Client
    from offloadctl import arguments as reading
    from offloadctl.progress import progress_bar

    common = common_options(ctx, endpoint, as_json)
    options = {
        "seed": seed,
        "timeout_s": reading.parse_duration(timeout, "--timeout"),
        "priority": priority,
        "adapters": reading.parse_adapters(adapters or ()),
        "keep_alive_s": reading.parse_keep_alive(keep_alive),
        **reading.pipeline_arguments(arguments or (), steps, size, Client.generate),
    }
    if detached:
        if file is not None:
            raise typer.BadParameter("a detached job writes no file, `fetch` does", param_hint="-o")
        _queue(common, model, prompt, options)
        return
    target = _checked_output(common, file)
    with daemon(common) as client, _saying_option(), progress_bar() as on_progress:
        result = client.generate(model, prompt, on_progress=on_progress, **options)
    _write(common, result, target)


def fetch(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `jobs` shows it.")],
    file: OutputOption = None,
    timeout: TimeoutOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait for a job that was queued before, and write its picture to a file."""
    from offloadctl import arguments as reading

    common = common_options(ctx, endpoint, as_json)
    timeout_s = reading.parse_duration(timeout, "--timeout")
    target = _checked_output(common, file)
    with daemon(common) as client, _saying_option():
        result = client.job(job).result(timeout_s)
    _write(common, result, target)


def _queue(common: Common, model: str, prompt: str | None, options: dict[str, Any]) -> None:
    from offloadctl import output

    with daemon(common) as client, _saying_option():
        job = client.submit(model, prompt, detached=True, **options)
        state = job.state
    output.print_answer({"job": job.id, "state": state}, job.id, as_json=common.as_json)


def _checked_output(common: Common, file: str | None) -> str:
    from offloadctl import arguments as reading

    if file is None:
        raise typer.BadParameter("say where to write the picture", param_hint="-o")
    reading.check_output(file, as_json=common.as_json, stdout_is_terminal=sys.stdout.isatty())
    return file


def _write(common: Common, result: Result, file: str) -> None:
    from offloadctl import output
    from offloadctl.pictures import write_pictures

    files = write_pictures(result.images, file)
    if common.as_json:
        output.print_json(output.result_data(result, files))
    else:
        # Standard output may carry the picture, so words go to standard error.
        sys.stderr.write(output.result_line(result, files) + "\n")


@contextmanager
def _saying_option() -> Iterator[None]:
    """Name the option where the client's error names its argument."""
    from offload_protocol.errors import TimedOut

    try:
        yield
    except TimedOut as error:
        hint = error.hint.replace("timeout_s", "--timeout")
        raise TimedOut(error.message, hint=hint, details=error.details) from None


def cancel(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `jobs` shows it.")],
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a job, whether it waits or runs."""
    common = common_options(ctx, endpoint, as_json)
    with daemon(common) as client:
        state = client.cancel(job)
    from offload_protocol.records import FINAL_STATES
    from offloadctl import output

    line = f"{job} {state}" if state in FINAL_STATES else f"{job} is being stopped"
    output.print_answer({"job": job, "state": state}, line, as_json=common.as_json)
