"""Two programs on one daemon: the long job gives way and is not changed; cancels leave nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from bench.cancel_rounds import cancel_rounds
from bench.fairness import PROMPT, Setting, settings, share, started
from bench.kill_rounds import RestartedDaemon

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Two models that fit the memory together."""
    everything = list(settings(tmp_path_factory.mktemp("models")))
    return next(one for one in everything if one.name == "two_models")


@pytest.fixture(scope="module")
def daemon(setting: Setting) -> Iterator[RestartedDaemon]:
    with started(setting, [sys.executable, "-m", "offloadd"]) as running:
        yield running


def test_case_41_a_long_job_gives_way_to_short_ones_and_draws_the_same_picture(
    daemon: RestartedDaemon, setting: Setting
) -> None:
    (measured,) = share(daemon, setting, long_steps=60, alone=2, rounds=1).rounds
    assert measured.is_identical
    assert measured.short_shared_s, "some short job ended before the long one"
    assert measured.parked_s > 0


def test_case_31_jobs_cancelled_at_random_points_leave_nothing_behind(
    daemon: RestartedDaemon,
) -> None:
    arguments = {"prompt": PROMPT, "num_inference_steps": 2}
    cancels = cancel_rounds(daemon, "shapes", arguments, jobs=40, seed=3)
    assert cancels.errors == []
    assert cancels.hanging == 0
    assert cancels.cancelled + cancels.done_before == 40
    assert cancels.cancelled > 10
    assert cancels.next_is_right
    assert cancels.grown_descriptors == 0
