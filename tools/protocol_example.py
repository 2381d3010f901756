"""Writes the worked example of docs/protocol.md from the codec itself, so that it cannot go stale.

`python tools/protocol_example.py` brings the document up to date; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from offload_protocol.codec import encode, plain
from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import (
    PROTOCOL_VERSION,
    Finished,
    Hello,
    Progress,
    Reply,
    Submit,
    Taken,
)
from offload_protocol.records import JobInfo, Outcome, Timings, Welcome

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "protocol.md"
BEGIN = "<!-- worked example: made by tools/protocol_example.py -->"
END = "<!-- end of the worked example -->"

JOB = "6f1c"
PIXELS = bytes.fromhex("ff0000 ff0000 ffffff ffffff")
TO_DAEMON, TO_CLIENT = "client to daemon", "daemon to client"

Exchange = tuple[str, str, msgspec.Struct, tuple[bytes, ...]]


def exchanges() -> list[Exchange]:
    """Direction, title, message and frames of a whole conversation in its order."""
    welcome = Welcome(
        version=PROTOCOL_VERSION, daemon_version="0.1.0", instance="a81", limits=DEFAULT_LIMITS
    )
    submit = Submit(
        rid=2,
        job=JOB,
        model="shapes",
        arguments={"prompt": "a red circle", "num_inference_steps": 2},
        seed=7,
    )
    queued = JobInfo(job=JOB, model="shapes", state="queued", position=1)
    image = {"$image": 0, "mode": "RGB", "size": [2, 2]}
    outcome = Outcome(
        outputs={"images": [image]},
        seeds=[7],
        timings=Timings(queued_s=0.5, loading_s=0.0, running_s=1.25),
        moved_bytes=4096,
    )
    hello = Hello(rid=1, version=PROTOCOL_VERSION, session="s3cr3t", program="example")
    return [
        (TO_DAEMON, "hello", hello, ()),
        (TO_CLIENT, "the greeting", Reply(rid=1, result=plain(welcome)), ()),
        (TO_DAEMON, "submit", submit, ()),
        (TO_CLIENT, "accepted", Reply(rid=2, result=plain(queued)), ()),
        (TO_CLIENT, "progress", Progress(job=JOB, state="running", step=1, steps=2), ()),
        (
            TO_CLIENT,
            "the end, with a picture of 2 by 2 pixels",
            Finished(job=JOB, state="done", outcome=outcome),
            (PIXELS,),
        ),
        (TO_DAEMON, "taken", Taken(rid=3, job=JOB), ()),
    ]


def markdown() -> str:
    """The example as it stands in the document."""
    parts = []
    for number, (direction, title, message, frames) in enumerate(exchanges(), start=1):
        body = encode(message)
        lines = [f"**{number}. {title}** ({direction})", "", "```text"]
        lines.append(f"frame 0: {len(body)} bytes, msgpack")
        lines += [f"  {text}" for text in annotated(body)]
        for index, frame in enumerate(frames):
            lines += [f"frame {index + 1}: {len(frame)} bytes", f"  {frame.hex(' ')}"]
        parts.append("\n".join([*lines, "```"]))
    return "\n\n".join(parts)


def annotated(body: bytes) -> list[str]:
    """One line for each item of a msgpack body: its bytes and what they say."""
    lines, depths = [], [(1, False)]
    for raw, meaning, children, is_map in _items(body):
        indent = "  " * (len(depths) - 1)
        lines.append(f"{raw.hex(' '):<30} {indent}{meaning}")
        left, is_key_map = depths[-1]
        depths[-1] = (left - 1, is_key_map)
        if children:
            depths.append((children, is_map))
        while len(depths) > 1 and depths[-1][0] == 0:
            depths.pop()
    return lines


def _items(body: bytes) -> Iterator[tuple[bytes, str, int, bool]]:
    """Bytes, meaning, number of items within and whether these are a map's; one level each."""
    place = 0
    while place < len(body):
        first = body[place]
        length, children, is_map = 1, 0, False
        if 0x80 <= first <= 0x8F:
            children, is_map = 2 * (first & 15), True
            meaning = f"map of {first & 15}"
        elif 0x90 <= first <= 0x9F:
            children, meaning = first & 15, f"list of {first & 15}"
        else:
            length = _scalar_length(body, place)
            meaning = repr(msgspec.msgpack.decode(body[place : place + length]))
        yield body[place : place + length], meaning, children, is_map
        place += length


def _scalar_length(body: bytes, place: int) -> int:
    first = body[place]
    if 0xA0 <= first <= 0xBF:
        return 1 + (first & 31)
    if first == 0xD9:
        return 2 + body[place + 1]
    fixed = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5}
    return fixed.get(first, 1)


def updated(document: str) -> str:
    """The document with the example of this codec."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
