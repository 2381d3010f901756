"""The same seed gives the same picture whatever the mode, the neighbours and the order."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hosting.hosting_help import CPU, Drawn, draw, host, new_device_host, plain_script

from offload_protocol.errors import Cancelled
from offloadd.hosting.device_host import accelerator_for
from offloadd.hosting.hosted import HostedModel

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"offload": "none"},
    "model": {"offload": "model", "device_budget": "400KiB"},
    "sequential": {"offload": "sequential"},
    "leaves": {"offload": {"mode": "group", "offload_type": "leaf_level"}},
    "stream": {"device_budget": "400KiB"},
}
SEEDS = (3, 4)


def stopped_at(number: int) -> Any:
    """Cancels at the border with this number."""
    left = [number]

    def at_border() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Cancelled("stop")

    return at_border


@pytest.mark.parametrize("order", range(2))
def test_case_45_a_seed_gives_one_picture_in_every_mode_beside_others_in_any_order(
    sd_directory: Path, flux_directory: Path, order: int
) -> None:
    device = new_device_host(accelerator_for(CPU))
    models: list[tuple[Path, HostedModel]] = [
        (directory, host(directory, on=device, **settings))
        for directory in (sd_directory, flux_directory)
        for settings in SETTINGS.values()
    ]
    expected: dict[tuple[Path, int], Drawn] = {
        (directory, seed): plain_script(directory, seed)
        for directory in (sd_directory, flux_directory)
        for seed in SEEDS
    }
    requests = [(directory, model, seed) for directory, model in models for seed in SEEDS]
    random = Random(order)
    random.shuffle(requests)
    for directory, model, seed in requests:
        if random.random() < 0.3:
            with pytest.raises(Cancelled):
                draw(random.choice(models)[1], at_border=stopped_at(random.randint(1, 12)))
        np.testing.assert_array_equal(draw(model, seed), expected[directory, seed])
    assert all(model.unload() == [] for _, model in models)
