"""A process that lives for one question, beside the worker, and ends with whoever asked it."""

from __future__ import annotations

from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from offload_protocol.errors import InternalError


@asynccontextmanager
async def child(
    command: Sequence[str], environ: Mapping[str, str], purpose: str
) -> AsyncIterator[Process]:
    """Start it with pipes to its standard input and output; it is killed if the block ends first.

    Raises `InternalError`, with the `purpose` as what it does, where it cannot be started.
    """
    try:
        process = await create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environ)
    except OSError as error:
        raise InternalError(f"the process that {purpose} cannot be started: {error}") from None
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
