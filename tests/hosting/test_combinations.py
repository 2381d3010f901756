"""Every memory feature in every mode and beside every other: the plain picture, or a refusal.

The table in `docs/combinations.md` is what these tests found; a run with OFFLOADD_WRITE_TABLE=1
writes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from hosting.families import FAMILIES
from hosting.hosting_help import SEED, Drawn, device_host, host, run
from hosting.tiny_gguf import save_gguf
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from offload_protocol.errors import InvalidRequest
from offloadd.channel.checked_specs import model_spec

TABLE = Path(__file__).parents[2] / "docs" / "combinations.md"
CALL = FAMILIES["flux"].arguments(
    height=32, width=32, num_images_per_prompt=2, num_inference_steps=1, output_type="np"
)
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "model": {"mode": "model"},
    "sequential": {"mode": "sequential"},
    "group, block level": {"mode": "group", "num_blocks_per_group": 2, "use_stream": True},
    "group, leaf level": {"mode": "group", "offload_type": "leaf_level"},
    "stream": {"mode": "stream"},
}
"""Groups rest on disk; `model`, `sequential` and `stream` have a budget below the weights."""

EAGER = "eager"
"""What compiles here: blocks are traced and their graphs run as they are, to the last bit."""

SHARE = 0.55
"""Of the weights, the budget of a model."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A setting of one component, and what a plain script does for it."""

    component: str
    settings: dict[str, Any]
    plain: Callable[[Any], object]


def cast(storage: torch.dtype, **options: Any) -> Callable[[Any], object]:
    return lambda module: module.enable_layerwise_casting(
        storage_dtype=storage, compute_dtype=torch.float32, **options
    )


def quantised(kind: type[Any]) -> Callable[[Any], object]:
    return lambda module: quantize_(module, kind(set_inductor_config=False))


def compiled(module: Any) -> object:
    return module.compile_repeated_blocks(backend=EAGER)


GGUF = "flux-Q8_0.gguf"
"""In the model's directory."""

OF_TEXT = "`quantization` (`float8`) of a text encoder"


def from_gguf(module: Any) -> object:
    """The module with its weights from the file beside the model."""
    directory = Path(module.config._name_or_path)
    return type(module).from_single_file(
        str(directory.parent / GGUF),
        config=str(directory),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        dtype=torch.float32,
    )


FEATURES: dict[str, Feature] = {
    "`source` in GGUF": Feature("transformer", {"source": GGUF}, from_gguf),
    "`storage_dtype`": Feature(
        "transformer", {"storage_dtype": "float8_e4m3fn"}, cast(torch.float8_e4m3fn)
    ),
    "`storage_dtype`, `storage_skip`": Feature(
        "transformer",
        {"storage_dtype": "float8_e5m2", "storage_skip": ["attn", "norm"]},
        cast(torch.float8_e5m2, skip_modules_pattern=("attn", "norm")),
    ),
    "`quantization`": Feature(
        "transformer", {"quantization": "int8"}, quantised(Int8WeightOnlyConfig)
    ),
    OF_TEXT: Feature(
        "text_encoder_2", {"quantization": "float8"}, quantised(Float8WeightOnlyConfig)
    ),
    "`tiling`": Feature("vae", {"tiling": True}, lambda module: module.enable_tiling()),
    "`slicing`": Feature("vae", {"slicing": True}, lambda module: module.enable_slicing()),
    "`channels_last`": Feature(
        "vae",
        {"channels_last": True},
        lambda module: module.to(memory_format=torch.channels_last),
    ),
    "`attention_backend`": Feature(
        "transformer",
        {"attention_backend": "_native_math"},
        lambda module: module.set_attention_backend("_native_math"),
    ),
    "`compile`": Feature("transformer", {"compile": "regional"}, compiled),
    "`attention_backend` from the hub": Feature(
        "transformer", {"attention_backend": "sage_hub"}, lambda module: None
    ),
    "`attention_backend` of an autoencoder": Feature(
        "vae", {"attention_backend": "native"}, lambda module: None
    ),
    "`tiling` of a transformer": Feature("transformer", {"tiling": True}, lambda module: None),
    "`compile` of an autoencoder": Feature("vae", {"compile": "regional"}, lambda module: None),
}


@contextmanager
def backend_kept() -> Iterator[None]:
    """Diffusers makes a model's backend that of every other model too."""
    before = _AttentionBackendRegistry.get_active_backend()[0]
    try:
        yield
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def plain(directory: Path, names: Sequence[str]) -> Drawn:
    """What a plain script draws with these features."""
    pipeline = diffusers.FluxPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    with backend_kept():
        for name in names:
            component = FEATURES[name].component
            made = FEATURES[name].plain(getattr(pipeline, component))
            if isinstance(made, diffusers.ModelMixin):
                setattr(pipeline, component, made)
        noise = [torch.Generator("cpu").manual_seed(SEED + number) for number in range(2)]
        images: Drawn = pipeline(generator=noise, **CALL).images
    return images


def settings(directory: Path, mode: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The model's settings for features in a mode."""
    components: dict[str, dict[str, Any]] = {}
    for name in names:
        feature = FEATURES[name]
        own = components.setdefault(feature.component, dict(mode))
        own.update(feature.settings)
        if "source" in own:
            own["source"] = str(directory / own["source"])
    return {"offload": mode, "components": components}


class Trials:
    """Tries combinations, and remembers what plain scripts drew for them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._drawn: dict[tuple[str, ...], Drawn] = {}
        whole = host(directory)
        self._whole_bytes = whole.resident_bytes
        whole.unload()

    def found(self, mode: dict[str, Any], names: Sequence[str]) -> str:
        """`works`, or the sentence that the combination is refused with."""
        if mode["mode"] == "group":
            # Where the other modes' packs are: a process that writes one takes seconds to start.
            mode = {**mode, "offload_to_disk_path": str(device_host()._cache)}
        options = settings(self._directory, mode, names)
        if mode["mode"] in ("model", "sequential", "stream"):
            options["device_budget"] = int(self._whole_bytes * SHARE)
        try:
            model = host(self._directory, **options)
        except InvalidRequest as refused:
            return refused.message.partition(": ")[2]
        key = tuple(names)
        if key not in self._drawn:
            self._drawn[key] = plain(self._directory, names)
        for _ in range(2):
            drawn = run(model, CALL)["images"]
            np.testing.assert_array_equal(drawn, self._drawn[key])
        assert model.unload() == []
        return "works"


@pytest.fixture
def compiling_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=EAGER))


@pytest.fixture(scope="module")
def trials(flux_directory_with_guidance: Path) -> Trials:
    return Trials(flux_directory_with_guidance)


@pytest.fixture(scope="module")
def flux_directory_with_guidance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flux")
    pipeline = FAMILIES["flux"].build()
    pipeline.save_pretrained(directory)
    weights = pipeline.transformer.state_dict()
    save_gguf(directory / GGUF, weights, gguf.GGMLQuantizationType.Q8_0)
    return directory


@pytest.mark.usefixtures("compiling_eagerly")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_feature_works_in_every_mode_and_beside_every_other_or_is_refused(
    trials: Trials,
) -> None:
    in_modes = {
        name: {title: trials.found(mode, [name]) for title, mode in MODES.items()}
        for name in FEATURES
    }
    working = [name for name, found in in_modes.items() if set(found.values()) == {"works"}]
    assert len(working) == 10
    beside = {
        (one, other): trials.found(MODES["stream"], [one, other])
        for one, other in combinations(working, 2)
        if not (one.startswith("`storage_dtype`") and other.startswith("`storage_dtype`"))
        and OF_TEXT not in (one, other)
    }
    everything = [
        name for name in working if "storage_dtype" not in name and name != "`quantization`"
    ]
    assert trials.found(MODES["stream"], everything) == "works"
    spread = {key: refusal_of(key) for key in ("device_map", "max_memory")}
    written = document(in_modes, beside, spread)
    if os.environ.get("OFFLOADD_WRITE_TABLE"):
        TABLE.write_text(written, encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == written


def test_every_feature_changes_something_that_a_picture_shows_or_how_it_is_computed(
    flux_directory_with_guidance: Path,
) -> None:
    usual = plain(flux_directory_with_guidance, [])
    for name in FEATURES:
        if not any(one in name for one in ("storage_dtype", "quantization", "tiling`")):
            continue
        if "of a transformer" in name:
            continue
        assert np.abs(plain(flux_directory_with_guidance, [name]) - usual).max() > 1e-4


def test_an_attention_backend_is_that_of_one_model_alone(
    flux_directory_with_guidance: Path,
) -> None:
    before = _AttentionBackendRegistry.get_active_backend()[0]
    model = host(
        flux_directory_with_guidance,
        components={"transformer": {"mode": "none", "attention_backend": "_native_math"}},
    )
    run(model, CALL)
    assert _AttentionBackendRegistry.get_active_backend()[0] == before
    assert model.unload() == []


def refusal_of(key: str) -> str:
    """What a setting of the whole model is refused with."""
    with pytest.raises(InvalidRequest) as refused:
        model_spec("tiny", "/model", {key: "balanced"})
    return refused.value.message.partition(": ")[2]


def document(
    in_modes: dict[str, dict[str, str]],
    beside: dict[tuple[str, str], str],
    spread: dict[str, str],
) -> str:
    """The page that tells what was found."""
    lines = [
        "# Which memory features work together",
        "",
        "Written by `OFFLOADD_WRITE_TABLE=1 pytest tests/hosting/test_combinations.py`; without "
        "the variable the test compares. *Works* means: on a tiny Flux with random weights, "
        "hosted on a CPU, two requests gave bit for bit the picture of a plain diffusers script "
        "with the same feature. `model`, `sequential` and `stream` had a budget of 55% of the "
        "weights, `group` an `offload_to_disk_path`.",
        "",
        f"| feature | {' | '.join(MODES)} |",
        f"|---|{'---|' * len(MODES)}",
    ]
    refused: dict[str, str] = {}
    for name, found in in_modes.items():
        sentences = {one for one in found.values() if one != "works"}
        cells = ["works" if one == "works" else "refused" for one in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        refused.update(dict.fromkeys([name] if sentences else [], next(iter(sentences), "")))
    lines += [
        "",
        "`compile` was tried with the backend `eager`; what torch compiles by itself gives the "
        "picture to 1e-4, since fused operations round at other places "
        "(`tests/hosting/test_features.py`).",
        "",
        "Refused when the model is loaded, with this reason:",
        "",
    ]
    lines += [f"- {name}: {sentence}" for name, sentence in refused.items()]
    lines += [f"- `{key}`: {sentence}" for key, sentence in spread.items()]
    lines += ["", "Two at once, in the mode `stream`:", "", "| | beside | |", "|---|---|---|"]
    lines += [
        f"| {one} | {other} | {found if found == 'works' else f'refused: {found}'} |"
        for (one, other), found in beside.items()
    ]
    return "\n".join(lines) + "\n"
