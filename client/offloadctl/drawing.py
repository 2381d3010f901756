"""Commands about one job: draw, and cancel."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from offloadctl.common import EndpointOption, JsonOption, common_options, daemon


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

    common = common_options(ctx, endpoint, as_json)
    named = reading.pipeline_arguments(arguments or (), steps, size, Client.generate)
    timeout_s = reading.parse_timeout(timeout)
    reading.check_output(file, as_json=common.as_json, stdout_is_terminal=sys.stdout.isatty())
    with daemon(common) as client:
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
    from offloadctl import output

    if common.as_json:
        output.print_json({"job": job, "state": state})
    else:
        output.print_line(f"{job} {state}")
