"""What hostile peers can do to a daemon: nothing, is the aim.

    python bench/fuzz.py [--quick] [--json FILE]

100,000 messages on a real daemon's socket, a tenth of them requests of any shape and types
(hypothesis), the rest random bytes, said by peers that have said hello and by peers that have not.
Meanwhile a good client pings and runs jobs, each of which has to be answered. `rss_growth_bytes` is
measured between the end of the first tenth, when everything has been used once, and the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from bench.wire_peers import daemon
from system.hostile import REQUEST, Stranger, random_frames, served_meanwhile

from offload_client import Client


def main() -> int:
    options = _options()
    count = 4_000 if options.quick else 100_000
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
        daemon(Path(folder)) as (endpoint, pid),
    ):
        figures = _attack(endpoint, psutil.Process(pid), count)
    for key, value in figures.items():
        print(f"{key:24} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["alive"] else 1


def _attack(endpoint: str, process: psutil.Process, count: int) -> dict[str, Any]:
    strangers = [Stranger(endpoint, greets=greets) for greets in (True, False)]
    chance, start = random.Random(36), time.perf_counter()
    with served_meanwhile(endpoint) as longest_s:
        _say_both(strangers, count // 10, chance)
        warm_bytes = process.memory_info().rss
        _say_both(strangers, count - count // 10, chance)
    took_s = time.perf_counter() - start
    for stranger in strangers:
        stranger.close()
    with Client(endpoint) as client:
        daemon = client.stats()["daemon"]
    return {
        "frames": count,
        "alive": process.is_running() and daemon["pid"] == process.pid,
        "frames_per_s": count / took_s,
        "protocol_errors": daemon["protocol_errors_total"],
        "rss_bytes": process.memory_info().rss,
        "rss_growth_bytes": process.memory_info().rss - warm_bytes,
        "longest_ping_s": longest_s[0],
    }


def _say_both(strangers: list[Stranger], count: int, chance: random.Random) -> None:
    structured = count // 10

    @settings(
        max_examples=structured,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(REQUEST, st.lists(st.binary(max_size=100), max_size=3))
    def say(request: dict[str, Any], frames: list[bytes]) -> None:
        strangers[0].say(msgspec.msgpack.encode(request), *frames)

    say()
    for _ in range(count - structured):
        chance.choice(strangers).say(*random_frames(chance))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="4,000 messages")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
