"""Promise 6: nothing accepted is lost, and a result is delivered once, whoever is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.kill_rounds import Counts, KillRounds, Load, RestartedDaemon

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SCRIPTED_DAEMON = Path(__file__).parents[1] / "control" / "scripted_daemon.py"
PROMPT = "a red circle on a white background"
SEEDS = 3


@contextmanager
def restarted(directory: Path, *command: str) -> Iterator[RestartedDaemon]:
    directory.mkdir()
    (directory / "offloadd.toml").write_text('[[models]]\nname = "good"\nsource = "/good"\n')
    daemon = RestartedDaemon(command, directory)
    try:
        yield daemon
    finally:
        daemon.stop()


def assert_nothing_lost(counts: Counts, rounds: int) -> None:
    figures = counts.figures()
    assert counts.errors == []
    assert (figures["jobs_lost"], figures["jobs_duplicated"], figures["jobs_wrong"]) == (0, 0, 0)
    assert counts.accepted > rounds
    assert counts.worker_kills + counts.daemon_kills == rounds


def test_twenty_kills_under_load_lose_duplicate_and_change_no_job(short_tmp: Path) -> None:
    # The scripted worker is a real process that starts in a moment, so that the kills hit work and
    # not twenty imports of torch; what it sends back shows whose job it was.
    def arguments(number: int) -> dict[str, Any]:
        return {"prompt": "steps 3", "seed": number, "guidance_scale": number + 0.5}

    def is_right(number: int, result: Any) -> bool:
        return bool(result.outputs == {"steps": 3} and result.seeds == (number,))

    with restarted(short_tmp / "kills", sys.executable, str(SCRIPTED_DAEMON)) as daemon:
        load = Load("good", arguments, is_right)
        counts = KillRounds(daemon, load, seed=20).run(rounds=20, longest_wait_s=0.6)
    assert_nothing_lost(counts, 20)
    assert counts.worker_kills
    assert counts.daemon_kills


def test_pictures_are_the_same_after_worker_and_daemon_were_killed(short_tmp: Path) -> None:
    with restarted(short_tmp / "pictures", sys.executable, "-m", "offloadd") as daemon:
        daemon.wait_until_ready()
        steps: dict[str, Any] = {"prompt": PROMPT, "num_inference_steps": 2}
        with daemon.client("reference") as client:
            pixels = [
                client.generate("shapes", seed=seed, **steps).image.tobytes()
                for seed in range(SEEDS)
            ]
        load = Load(
            "shapes",
            lambda number: {**steps, "seed": number % SEEDS},
            lambda number, result: bool(result.image.tobytes() == pixels[number % SEEDS]),
        )
        counts = KillRounds(daemon, load, seed=3).run(rounds=3, longest_wait_s=1.0)
    assert_nothing_lost(counts, 3)
    assert counts.worker_kills
    assert counts.daemon_kills
