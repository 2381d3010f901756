"""Adapters of a hosted model: each run wears its own, as plain diffusers does, and no other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosting import tiny_image_families as families
from hosting.hosting_help import (
    SEED,
    Drawn,
    call_arguments,
    host,
    host_without_room,
    new_device_host,
)
from hosting.tiny_adapter_files import (
    ATTENTION,
    CONVOLUTIONS,
    plain_with,
    save_adapter,
    sd_adapter,
)
from offload.rig import simulated_device
from offload.tiny_adapters import StateDict, lora

from offload_protocol.errors import InvalidRequest, ModelLoadFailed, OffloadError
from offload_protocol.messages import AdapterChoice
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.running.arguments import prepare_call
from offloadd.hosting.running.aside import JobAside
from offloadd.hosting.sources.describe import describe
from offloadd.offload.accelerator.cpu import CpuAccelerator

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning"),
]

PLACES: dict[str, tuple[Callable[[], DeviceHost], dict[str, Any]]] = {
    "in place": (lambda: new_device_host(CpuAccelerator()), {}),
    "resident": (lambda: new_device_host(simulated_device()), {"offload": "none"}),
    "streamed": (lambda: new_device_host(simulated_device()), {"offload": "sequential"}),
    "from disk": (host_without_room, {"offload": "sequential"}),
}


@pytest.fixture(scope="module")
def files(sd_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters: one of U-Net and text encoder, one of other layers of the U-Net alone."""
    at = tmp_path_factory.mktemp("adapters")
    ink = sd_adapter(sd_directory, 1, ATTENTION, encoder=True)
    oil = sd_adapter(sd_directory, 7, CONVOLUTIONS, encoder=False)
    return {
        "ink": save_adapter(at / "ink.safetensors", ink),
        "oil": save_adapter(at / "oil" / "pytorch_lora_weights.safetensors", oil),
    }


def registered(files: dict[str, Path]) -> list[dict[str, str]]:
    return [{"name": name, "source": str(file)} for name, file in files.items()]


def draw(
    model: HostedModel,
    at_root: Callable[[JobAside], None] | None = None,
    **weights: float,
) -> Drawn:
    description = model.description
    call = prepare_call(
        call_arguments(description.files.directory),
        description.parameters,
        SEED,
        model.device,
        description.dtype,
    )
    chosen = [AdapterChoice(name=name, weight=weight) for name, weight in weights.items()]
    images: Drawn = model.run(call, lambda *_: None, lambda: None, at_root, adapters=chosen)[
        "images"
    ]
    return images


@pytest.mark.parametrize("place", PLACES)
def test_each_run_wears_its_adapters_as_plain_diffusers_and_the_next_none(
    sd_directory: Path, files: dict[str, Path], references: dict[Path, Drawn], place: str
) -> None:
    make_host, options = PLACES[place]
    model = host(sd_directory, on=make_host(), adapters=registered(files), **options)
    ink, oil = {"ink": files["ink"]}, {"oil": files["oil"]}
    plain = references[sd_directory]
    np.testing.assert_array_equal(draw(model), plain)
    first = draw(model, ink=0.8)
    np.testing.assert_array_equal(first, plain_with(sd_directory, ink, {"ink": 0.8}))
    assert not np.array_equal(first, plain)
    np.testing.assert_array_equal(draw(model), plain)
    np.testing.assert_array_equal(draw(model, oil=1.5), plain_with(sd_directory, oil, {"oil": 1.5}))
    both = {"oil": 0.4, "ink": 1.0}
    np.testing.assert_array_equal(draw(model, None, **both), plain_with(sd_directory, files, both))
    np.testing.assert_array_equal(draw(model, ink=0.8), first)
    np.testing.assert_array_equal(draw(model), plain)
    assert model.unload() == []


def test_an_adapter_is_loaded_once_counted_and_comes_back_with_a_model_that_rested(
    sd_directory: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = new_device_host(simulated_device())
    model = host(sd_directory, on=on, adapters=registered(files), offload="stream")
    loads: list[str] = []
    load = type(model._pipeline).load_lora_weights

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        loads.append(kwargs["adapter_name"])
        load(self, *args, **kwargs)

    monkeypatch.setattr(type(model._pipeline), "load_lora_weights", counted)
    first = draw(model, ink=0.8)
    draw(model)
    np.testing.assert_array_equal(draw(model, ink=0.8), first)
    assert len(loads) == 1
    held = {one.name: one.adapter_bytes for one in on.engine.stats().components}
    assert sum(held.values()) >= files["ink"].stat().st_size * 3 // 4
    model.rest()
    model.gather(lambda done, total: None)
    assert all(one.adapter_bytes == 0 for one in on.engine.stats().components)
    np.testing.assert_array_equal(draw(model, ink=0.8), first)
    assert len(loads) == 2
    assert model.unload() == []
    assert on.engine.stats().resident_bytes == 0


@pytest.mark.parametrize("offload", ["none", "sequential"])
def test_runs_that_give_way_to_each_other_never_colour_each_other(
    sd_directory: Path, files: dict[str, Path], references: dict[Path, Drawn], offload: str
) -> None:
    on = new_device_host(simulated_device())
    model = host(sd_directory, on=on, adapters=registered(files), offload=offload)
    alone = {"ink": plain_with(sd_directory, {"ink": files["ink"]}, {"ink": 0.8})}
    alone["oil"] = plain_with(sd_directory, {"oil": files["oil"]}, {"oil": 1.5})
    seen: list[tuple[Drawn, Drawn]] = []

    def others(aside: JobAside) -> None:
        assert aside.leave() is not None
        # Those that run in between load theirs while this one is in the middle of its call.
        seen.append((draw(model, oil=1.5), draw(model)))
        aside.come_back()

    np.testing.assert_array_equal(draw(model, others, ink=0.8), alone["ink"])
    assert len(seen) > 3
    for oil, none in seen:
        np.testing.assert_array_equal(oil, alone["oil"])
        np.testing.assert_array_equal(none, references[sd_directory])

    def dressed(aside: JobAside) -> None:
        assert aside.leave() is not None
        np.testing.assert_array_equal(draw(model, ink=0.8), alone["ink"])
        aside.come_back()

    np.testing.assert_array_equal(draw(model, dressed), references[sd_directory])
    model.unload()


def _wrong_shape(state: StateDict) -> StateDict:
    key = next(key for key in state if key.startswith("unet") and "lora_B" in key)
    return {**state, key: torch.zeros(state[key].shape[0] + 3, state[key].shape[1])}


def _partial(state: StateDict) -> StateDict:
    lost = next(key for key in state if "lora_A" in key)
    return {key: one for key, one in state.items() if key != lost}


def _of_another_model(state: StateDict) -> StateDict:
    return {key.replace("unet.", "unet.layers."): one for key, one in state.items()}


def _more_than_pairs(state: StateDict) -> StateDict:
    return {**state, "unet.conv_in.diff": torch.zeros(3)}


SPOILT: dict[str, tuple[Callable[[StateDict], StateDict], str]] = {
    "shape": (_wrong_shape, "'spoilt'.*shape"),
    "partial": (_partial, "'spoilt'.*lora_A"),
    "another": (_of_another_model, "'spoilt'.*none of its layers"),
    "more": (_more_than_pairs, "'spoilt'.*diff"),
}


def _save_spoilt(kind: str, file: Path, directory: Path) -> tuple[type[OffloadError], str]:
    state = sd_adapter(directory, 3, ATTENTION, encoder=False)
    if kind in SPOILT:
        spoil, message = SPOILT[kind]
        save_adapter(file, spoil(state))
        return InvalidRequest, message
    if kind == "pickle":
        torch.save(state, file)
    elif kind == "truncated":
        save_adapter(file, state)
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        file.unlink(missing_ok=True)
    return ModelLoadFailed, "'spoilt'"


@pytest.mark.parametrize("kind", [*SPOILT, "pickle", "truncated", "missing"])
def test_case_11_a_spoilt_adapter_is_refused_when_registered_and_when_first_used(
    sd_directory: Path, references: dict[Path, Drawn], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "spoilt.safetensors"
    error, message = _save_spoilt(kind, file, sd_directory)
    entry: dict[str, Any] = {"adapters": [{"name": "spoilt", "source": str(file)}]}
    with pytest.raises(error, match=message):
        describe(model_spec("m", str(sd_directory), entry), on_cpu=True)
    # It was sound when the model was loaded, and is not any more.
    good = sd_adapter(sd_directory, 3, ATTENTION, encoder=False)
    save_adapter(file, good)
    on = new_device_host(simulated_device())
    model = host(sd_directory, on=on, offload="sequential", **entry)
    _save_spoilt(kind, file, sd_directory)
    with pytest.raises(error, match=message):
        draw(model, spoilt=1.0)
    np.testing.assert_array_equal(draw(model), references[sd_directory])
    save_adapter(file, good)
    assert not np.array_equal(draw(model, spoilt=1.0), references[sd_directory])
    np.testing.assert_array_equal(draw(model), references[sd_directory])
    model.unload()


def kohya(state: StateDict) -> StateDict:
    """The same matrices as kohya's scripts name them, with a scale beside each pair."""
    named: StateDict = {}
    for key, one in state.items():
        path, _, matrix = key.removesuffix(".weight").rpartition(".")
        component, _, layer = path.partition(".")
        if component == "text_encoder":
            layer = f"text_model.{layer.removeprefix('text_model.')}"
        prefix = {"unet": "lora_unet", "text_encoder": "lora_te"}[component]
        own = f"{prefix}_{layer.replace('.', '_')}"
        named[f"{own}.{'lora_down' if matrix == 'lora_A' else 'lora_up'}.weight"] = one
        named[f"{own}.alpha"] = torch.tensor(2.0)
    return named


def narrower(state: StateDict) -> StateDict:
    return {
        key: one[:, :-1].contiguous() if "down.weight" in key else one for key, one in state.items()
    }


def of_strange_layers(state: StateDict) -> StateDict:
    return {key.replace("attentions", "intentions"): one for key, one in state.items()}


def of_a_stranger(state: StateDict) -> StateDict:
    return {f"stranger.{key}": one for key, one in state.items()}


@pytest.mark.parametrize("spoil", [narrower, of_strange_layers, of_a_stranger])
def test_case_11_other_trainers_names_are_judged_when_the_model_is_registered(
    sd_directory: Path, tmp_path: Path, spoil: Callable[[StateDict], StateDict]
) -> None:
    state = kohya(sd_adapter(sd_directory, 3, ATTENTION, encoder=False))
    file = save_adapter(tmp_path / "odd.safetensors", spoil(state))
    adapters = [{"name": "odd", "source": str(file)}]
    with pytest.raises(InvalidRequest, match="adapter 'odd'") as refused:
        describe(model_spec("m", str(sd_directory), {"adapters": adapters}), on_cpu=True)
    assert refused.value.hint


def test_an_adapter_that_kohya_trained_is_worn_as_plain_diffusers_wears_it(
    sd_directory: Path, tmp_path: Path
) -> None:
    state = kohya(sd_adapter(sd_directory, 3, ATTENTION, encoder=True))
    files = {"ink": save_adapter(tmp_path / "ink.safetensors", state)}
    model = host(sd_directory, adapters=registered(files))
    expected = plain_with(sd_directory, files, {"ink": 0.8})
    for _ in range(2):
        np.testing.assert_array_equal(draw(model, ink=0.8), expected)
    assert model.unload() == []


@pytest.mark.parametrize("mode", ["none", "sequential"])
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_adapters_of_other_families_are_worn_as_plain_diffusers_wears_them(
    tmp_path: Path, family: str, mode: str
) -> None:
    pipeline = getattr(families, family)()
    pipeline.save_pretrained(tmp_path / "model")
    place = "transformer" if family == "flux" else "unet"
    inner = lora(getattr(pipeline, place), ATTENTION, seed=2)
    state = {f"{place}.{key}": one for key, one in inner.items()}
    if family == "sdxl":
        more = lora(pipeline.text_encoder_2, ("q_proj",), seed=3)
        state |= {f"text_encoder_2.{key}": one for key, one in more.items()}
    files = {"ink": save_adapter(tmp_path / "ink.safetensors", state)}
    plain = plain_with(tmp_path / "model", files, {})
    model = host(
        tmp_path / "model",
        on=new_device_host(simulated_device()),
        offload=mode,
        adapters=registered(files),
    )
    worn = draw(model, ink=0.8)
    # peft freezes the base, and torch then folds SDXL's inputs in another way.
    allowed = 1e-5 if family == "sdxl" else 0.0
    expected = plain_with(tmp_path / "model", files, {"ink": 0.8})
    np.testing.assert_allclose(worn, expected, rtol=0, atol=allowed)
    assert not np.array_equal(worn, plain)
    np.testing.assert_array_equal(draw(model), plain)
    np.testing.assert_array_equal(draw(model, ink=0.8), worn)
    assert model.unload() == []


@pytest.mark.parametrize("place", ["in place", "streamed"])
def test_case_53_adapters_beside_weights_in_8_bits_give_the_picture_of_layerwise_casting(
    sd_directory: Path, files: dict[str, Path], place: str
) -> None:
    def cast(pipeline: Any) -> None:
        # Plain diffusers cannot cast first: the adapter would be rounded to 8 bits as well.
        pipeline.unet.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        )

    make_host, options = PLACES[place]
    offload = {"mode": options.get("offload", "none"), "storage_dtype": "float8_e4m3fn"}
    model = host(
        sd_directory,
        on=make_host(),
        components={"unet": offload},
        adapters=registered(files),
        **options,
    )
    for weights in ({"ink": 0.8}, {}, {"oil": 1.5}):
        expected = plain_with(sd_directory, files, weights, change=cast)
        np.testing.assert_array_equal(draw(model, None, **weights), expected)
    assert model.unload() == []


def test_a_model_that_cannot_have_adapters_says_so(sd_directory: Path, tmp_path: Path) -> None:
    def spec(**options: Any) -> Any:
        return model_spec("m", str(sd_directory), options)

    one = {"name": "ink", "source": str(tmp_path)}
    with pytest.raises(InvalidRequest, match="two adapters named 'ink'"):
        spec(adapters=[one, one])
    with pytest.raises(InvalidRequest, match="'in k' is not the name"):
        spec(adapters=[{**one, "name": "in k"}])
    with pytest.raises(InvalidRequest, match="not an absolute path"):
        spec(adapters=[{**one, "source": "ink.safetensors"}])
    with pytest.raises(InvalidRequest, match="adapters and compile"):
        describe(spec(adapters=[one], offload={"compile": "regional"}), on_cpu=True)
    with pytest.raises(ModelLoadFailed, match="holds 0 safetensors files"):
        describe(spec(adapters=[one]), on_cpu=True)
