"""Each family's first, second and tenth request equals plain diffusers, in bits and in dtype.

So does one for which no text encoder computes, since its owner asked for the same prompt before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hosting.families import FAMILIES, Family
from hosting.hosting_help import CPU, SEED, device_host, host, run
from hosting.hosting_help import same_values as same

from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.sources.describe import describe

BETWEEN = 7
"""Requests with other seeds and prompts that come between the second and the tenth."""

SHARE = 0.55
"""Of the weights that may be in memory."""

EMBEDDINGS_BYTES = 1 << 24

pytestmark = [
    # Some warn that their own settings of a scheduler are out of fashion.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Where each way of building was saved to, filled as families ask for it."""
    return {}


def directory_of(family: Family, saved: dict[Any, Path], factory: Any) -> Path:
    if family.build not in saved:
        saved[family.build] = factory.mktemp("family")
        family.build().save_pretrained(saved[family.build])
    return saved[family.build]


def plain_outputs(family: Family, directory: Path) -> dict[str, Any]:
    """What plain diffusers gives for the family's call."""
    kind = getattr(diffusers, family.plain_class)
    pipeline = kind.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(SEED)
    output = pipeline(generator=noise, **family.arguments())
    return {name: value for name, value in output.items() if value is not None}


def differ(one: Any, other: Any) -> bool:
    while isinstance(one, list):
        one, other = one[0], other[0]
    return not np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_second_and_tenth_request_equal_plain_diffusers(
    name: str, saved: dict[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = FAMILIES[name]
    directory = directory_of(family, saved, tmp_path_factory)
    expected = {
        key: one for key, one in plain_outputs(family, directory).items() if one is not None
    }
    options: dict[str, Any] = {"task": family.task} if family.task else {}
    described = describe(model_spec(name, str(directory), options), on_cpu=True)
    # The rest is read again while the pipeline computes.
    budget_bytes = int(sum(described.component_bytes.values()) * SHARE)
    model = host(directory, device_budget=budget_bytes, **options)
    for _ in range(2):
        outputs = run(model, family.arguments())
        assert outputs.keys() == expected.keys()
        for key, value in expected.items():
            same(outputs[key], value)
    for number in range(BETWEEN):
        other = run(model, family.arguments(prompt="a dog" * number), seed=number)
    key = next(iter(expected))
    assert differ(other[key], expected[key])
    tenth = run(model, family.arguments())
    for key, value in expected.items():
        same(tenth[key], value)
    # Without decoding there is room for all the rest.
    assert model.moved_bytes > 0 or family.call.get("output_type") == "latent"
    store = device_host(CPU).embeddings
    store.set_limit(EMBEDDINGS_BYTES)
    run(model, family.arguments(), seed=1, owner="me")
    before = store.figures()
    assert before.entries > 0
    again = run(model, family.arguments(), owner="me")
    for key, value in expected.items():
        same(again[key], value)
    after = store.figures()
    assert (after.misses, after.size_bytes) == (before.misses, before.size_bytes)
    assert after.hits > before.hits
    assert model.unload() == []
    assert store.figures().entries == 0
    store.set_limit(0)
