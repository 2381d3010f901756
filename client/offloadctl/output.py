"""How answers reach the user: tables on a terminal, plain columns in a pipe, one JSON object.

rich is loaded only where it is seen, on a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload_client import Result
from offload_protocol.errors import OffloadError, StorageFailed
from offload_protocol.sizes import format_duration, format_size


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under headings; a column whose heading starts with `>` stands to the right."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    @property
    def names(self) -> list[str]:
        """The headings as they are shown."""
        return [heading.removeprefix(">") for heading in self.headings]


def print_json(data: Any) -> None:
    """The one JSON object of a command."""
    text = json.dumps(data, ensure_ascii=not _is_utf8(sys.stdout.encoding))
    # What file names that are not UTF-8 leave, half characters, JSON has escapes for.
    write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def print_tables(tables: Sequence[Table]) -> None:
    """Tables for a person; an empty one is left out, unless it is the only one."""
    shown = [table for table in tables if table.rows] or list(tables[:1])
    if sys.stdout.isatty():
        _print_rich(shown)
    else:
        write("\n".join(plain_text(table, titled=len(shown) > 1) for table in shown))


def print_line(text: str) -> None:
    """One line on standard output."""
    write(visible(text) + "\n")


def print_answer(data: Any, line: str, *, as_json: bool) -> None:
    """What a command did: one JSON object, or one line for a person."""
    if as_json:
        print_json(data)
    else:
        print_line(line)


def visible(text: str) -> str:
    """The text as one line; what is not printable is escaped, since terminals obey some of it."""
    return text if text.isprintable() else "".join(map(_visible_character, text))


def write(data: str | bytes) -> None:
    """Write to standard output; a reader that has enough and closes it is no error.

    Raises `StorageFailed` where it is a file that cannot be written.
    """
    try:
        if isinstance(data, str):
            encoding = sys.stdout.encoding
            sys.stdout.write(data.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError as error:
        # What is left in the buffer would complain once more when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise StorageFailed(
                f"standard output cannot be written: {error.strerror}",
                hint="make room where it leads",
            ) from error


def print_error(error: OffloadError) -> None:
    """An error for a person, with what to do about it."""
    sys.stderr.write(f"offloadctl: {visible(error.message)}\n")
    if error.hint:
        sys.stderr.write(f"            {visible(error.hint)}\n")


def error_data(code: str, message: str, hint: str = "", details: Any = None) -> dict[str, Any]:
    """An error as a JSON object."""
    return {
        "error": {"code": code, "message": message, "hint": hint, "details": dict(details or {})}
    }


def result_data(result: Result, files: Sequence[str]) -> dict[str, Any]:
    """What `generate` says as JSON."""
    timings = result.timings
    return {
        "job": result.job,
        "model": result.model,
        "files": list(files),
        "seed": result.seed,
        "seeds": list(result.seeds),
        "timings": {
            "queued_s": timings.queued_s,
            "loading_s": timings.loading_s,
            "running_s": timings.running_s,
        },
        "peak_device_bytes": result.peak_device_bytes,
        "moved_bytes": result.moved_bytes,
    }


def result_line(result: Result, files: Sequence[str]) -> str:
    """What `generate` says to a person."""
    facts = [f"seed {result.seed}", f"drawn in {format_duration(result.timings.running_s)}"]
    if result.timings.queued_s + result.timings.loading_s >= 0.5:
        waited_s = result.timings.queued_s + result.timings.loading_s
        facts.append(f"waited {format_duration(waited_s)}")
    if result.peak_device_bytes:
        facts.append(f"{format_size(result.peak_device_bytes)} on the device")
    return visible(f"{', '.join(files) or 'picture'}: {', '.join(facts)}")


def plain_text(table: Table, *, titled: bool) -> str:
    """Columns parted by two spaces, for a pipe."""
    lines = [table.names, *([visible(cell) for cell in row] for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headings))]
    text = [f"# {table.title}"] if titled else []
    for line in lines:
        cells = [
            cell.rjust(width) if heading.startswith(">") else cell.ljust(width)
            for cell, width, heading in zip(line, widths, table.headings, strict=True)
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def _visible_character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "") == "utf8"


def _print_rich(tables: Sequence[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        view = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in table.headings:
            justify = "right" if heading.startswith(">") else "left"
            view.add_column(heading.removeprefix(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in table.rows:
            # Text, so that brackets in a prompt or a path are not taken for markup.
            view.add_row(*(Text(visible(cell)) for cell in row))
        console.print(view)
