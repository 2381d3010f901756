"""A single-file checkpoint draws what plain diffusers' `from_single_file` draws; or is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hosting import tiny_image_families as families
from hosting.hosting_help import (
    SEED,
    Drawn,
    call_arguments,
    device_host,
    draw,
    host,
    new_device_host,
    plain_script,
)
from hosting.original_layouts import (
    flux_header,
    save_original,
    sd3_state,
    sd_state,
    sdxl_state,
    without_weights,
)
from hosting.test_packs import packed
from hosting.tiny_adapter_files import sd_adapter
from offload import tiny_denoisers as denoisers
from safetensors.torch import load_file, save_file

from offload_protocol.errors import InvalidRequest, ModelLoadFailed, OffloadError
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.device_host import accelerator_for
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.packs.pickles import Unpickler
from offloadd.hosting.planning.forecast import forecast
from offloadd.hosting.sources.describe import Description, describe
from offloadd.hosting.sources.original_files import OriginalFile
from offloadd.store.index import ComponentFiles, read_checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't:DeprecationWarning"
)


@dataclass(frozen=True, slots=True)
class Single:
    """A file, the directory of its configurations, and the class that plain diffusers takes."""

    file: Path
    config: Path
    kind: type[Any]

    def plain(self, dtype: torch.dtype | None = None) -> Drawn:
        """What plain diffusers draws with the file."""
        pipeline = self.kind.from_single_file(
            str(self.file), config=str(self.config), local_files_only=True, torch_dtype=dtype
        )
        return drawn_by(pipeline, self.config)

    def host(self, **options: Any) -> HostedModel:
        return host(self.file, config=str(self.config), **options)


def drawn_by(pipeline: Any, directory: Path) -> Drawn:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(SEED)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory)).images
    return images


def saved(
    place: Path, build: Callable[[], Any], state: Callable[[Any], dict[str, torch.Tensor]]
) -> Single:
    pipeline = build()
    config = place / "config"
    pipeline.save_pretrained(config)
    file = save_original(state(pipeline), place / "a model's ünique.safetensors")
    return Single(file, without_weights(config), type(pipeline))


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Single:
    return saved(tmp_path_factory.mktemp("sd"), families.sd, sd_state)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Single:
    return saved(tmp_path_factory.mktemp("sdxl"), families.sdxl, sdxl_state)


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose folder of the transformer holds its configuration alone."""
    directory = tmp_path_factory.mktemp("sd3")
    pipeline = families.sd3()
    pipeline.save_pretrained(directory / "base")
    save_original(sd3_state(pipeline.transformer), directory / "sd3.safetensors")
    without_weights(directory / "base" / "transformer")
    return directory


def described(file: Path, **options: Any) -> Description:
    return describe(model_spec("m", str(file), options), True)


def test_a_whole_pipeline_draws_what_plain_diffusers_does_and_is_not_written_again(
    sd: Single,
) -> None:
    on = new_device_host(accelerator_for(torch.device("cpu")))
    model = sd.host(on=on)
    expected = sd.plain()
    for _ in range(2):
        np.testing.assert_array_equal(draw(model), expected)
    assert not list(on.supply("m", {}, {}).cache.iterdir())
    found = {one.name: one for one in model.components()}
    assert found["unet"].files == [sd.file.name]
    assert found["unet"].bytes == model.description.component_bytes["unet"]
    assert model.unload() == []


def test_only_what_the_file_has_in_another_arrangement_is_packed(
    sdxl: Single, tmp_path: Path
) -> None:
    model = sdxl.host()
    expected = sdxl.plain()
    for _ in range(2):
        np.testing.assert_array_equal(draw(model), expected)
    source = model._loaded.sources["text_encoder_2"]
    files = model.description.adapter_base.checkpoints["text_encoder_2"]
    # open_clip multiplies with the projection from the other side.
    assert files.unplaced == {"text_projection.weight"}
    assert source.layout.size_bytes > 0
    assert model.unload() == []
    link = tmp_path / "other name.safetensors"
    link.symlink_to(sdxl.file)
    before = packed(device_host().supply("m", {}, {}).cache)
    first, second = sdxl.host(), Single(link, sdxl.config, sdxl.kind).host()
    assert packed(device_host().supply("m", {}, {}).cache) == before
    for name, source in first._loaded.sources.items():
        other: Any = second._loaded.sources[name]
        assert source._extent is other._extent  # type: ignore[attr-defined]
    assert first.unload() == [] == second.unload()


def test_weights_in_another_dtype_are_packed_and_draw_the_same(sd: Single, tmp_path: Path) -> None:
    half = {name: one.half() for name, one in load_file(sd.file).items()}
    file = tmp_path / "half.safetensors"
    save_file(half, file)
    single = Single(file, sd.config, sd.kind)
    for dtype, torch_dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        model = single.host(dtype=dtype)
        np.testing.assert_array_equal(draw(model), single.plain(torch_dtype))
        assert model.unload() == []


def test_a_transformer_as_its_authors_publish_it_takes_the_place_of_a_component(
    sd3: Path,
) -> None:
    base, file = sd3 / "base", sd3 / "sd3.safetensors"
    transformer = diffusers.SD3Transformer2DModel.from_single_file(
        str(file), config=str(base), subfolder="transformer", local_files_only=True
    )
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(base, transformer=transformer)
    expected = drawn_by(pipeline, base)
    model = host(
        base,
        components={"transformer": {"source": str(file)}},
        offload={"mode": "group"},
        device_budget="60%",
    )
    for _ in range(2):
        np.testing.assert_array_equal(draw(model), expected)
    found = {one.name: one for one in model.components()}
    assert found["transformer"].files == [file.name]
    assert found["transformer"].offload == "group"
    assert model.unload() == []


def test_the_weights_of_flux_are_read_where_they_lie_but_for_two(tmp_path: Path) -> None:
    module = diffusers.FluxTransformer2DModel
    with torch.device("meta"):
        module(num_layers=1, num_single_layers=1).save_config(tmp_path)
    file = OriginalFile(read_checkpoint(flux_header(tmp_path / "flux.safetensors")))
    asked = ComponentFiles("transformer", "diffusers", module.__name__, tmp_path, None)
    found = file.component(asked)
    assert found is not None
    assert found.checkpoint is not None
    # Scale and shift of the last norm are the other way round.
    assert found.checkpoint.unplaced == {"norm_out.linear.weight", "norm_out.linear.bias"}
    places = found.checkpoint.tensors
    q, k = (places[f"single_transformer_blocks.0.attn.to_{one}.weight"] for one in "qk")
    assert k.start_bytes == q.stop_bytes
    assert q.start_bytes == file.index.tensors["single_blocks.0.linear1.weight"].start_bytes


def test_a_component_may_come_from_a_file_or_a_directory_of_another_model(
    sd_directory: Path, other_sd_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "unet.safetensors"
    shutil.copy(other_sd_directory / "unet" / "diffusion_pytorch_model.safetensors", file)
    unet = diffusers.UNet2DConditionModel.from_pretrained(other_sd_directory / "unet")
    expected = drawn_by(
        diffusers.StableDiffusionPipeline.from_pretrained(sd_directory, unet=unet), sd_directory
    )
    for source in (file, other_sd_directory / "unet"):
        model = host(sd_directory, components={"unet": {"source": str(source)}})
        np.testing.assert_array_equal(draw(model), expected)
        assert model.unload() == []
    plain = host(sd_directory)
    np.testing.assert_array_equal(draw(plain), plain_script(sd_directory))
    assert plain.unload() == []


def test_weights_in_memory_serve_when_the_file_is_gone(sdxl: Single, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    shutil.copy(sdxl.file, file)
    spec = model_spec("m", str(file), {"config": str(sdxl.config)})
    before = describe(spec, True)
    held = {one.origin: one.checkpoint for one in before.files.components if one.checkpoint}
    assert len(held) == 4, "each component is recalled by a place of its own"
    file.unlink()
    with pytest.raises(ModelLoadFailed, match="is not there"):
        describe(spec, True)
    after = describe(spec, True, recall=lambda place, variant: held.get(place))
    assert after.files == before.files


def test_what_it_takes_is_known_before_it_is_loaded(sd: Single) -> None:
    from offloadd.channel.forecasts import ForecastOrder

    spec = model_spec("plan", str(sd.file), {"config": str(sd.config)})
    told = forecast(ForecastOrder(spec=spec, on_cpu=True, device_bytes=1 << 40, free_bytes=1 << 40))
    found = described(sd.file, config=str(sd.config))
    assert {one.name for one in told.components} == found.component_bytes.keys()
    assert sum(one.bytes for one in told.components) >= sum(found.component_bytes.values()) > 0


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_pickled_file_is_taken_where_pickles_are_allowed(
    sd: Single, tmp_path: Path, is_nested: bool
) -> None:
    state = load_file(sd.file)
    file = tmp_path / "model.ckpt"
    torch.save({"state_dict": state, "epoch": 3} if is_nested else state, file)
    with pytest.raises(ModelLoadFailed, match="pickles are not accepted"):
        described(file, config=str(sd.config))
    spec = model_spec("m", str(file), {"config": str(sd.config), "weights_only": True})
    found = describe(spec, True, unpickle=Unpickler(tmp_path / "cache"))
    assert found.component_bytes == described(sd.file, config=str(sd.config)).component_bytes
    model = host(file, config=str(sd.config), weights_only=True)
    np.testing.assert_array_equal(draw(model), sd.plain())
    assert model.unload() == []


def only(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name: one for name, one in state.items() if name.startswith(prefix)}


def lora(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return sd_adapter(Path(), 0, ["to_q"], encoder=False)


def narrower(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one[..., : max(1, one.shape[-1] // 2)] for name, one in state.items()}


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "unet alone": (
        lambda state: only(state, "model."),
        r"holds weights of unet, but none of (vae|text_encoder) .*",
    ),
    "no text encoder": (
        lambda state: only(state, "model.") | only(state, "first_"),
        r"holds weights of .*unet.*, but none of text_encoder \(CLIPTextModel\)",
    ),
    "another size": (narrower, "does not fit .*tensors of other shapes, such as"),
    "a tensor less": (
        lambda state: {name: one for name, one in state.items() if "out.2" not in name},
        r"does not fit .*'unet'.* lacks 2 tensors, such as conv_out\.",
    ),
    "another family": (
        lambda state: sd3_state(denoisers.sd3()),
        "holds no weights of a StableDiffusionPipeline",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_does_not_go_with_its_configuration_is_refused_when_it_is_registered(
    sd: Single, tmp_path: Path, change: str
) -> None:
    changed, told = CHANGES[change]
    file = save_original(changed(load_file(sd.file)), tmp_path / "m.safetensors")
    with pytest.raises(ModelLoadFailed, match=told) as refused:
        described(file, config=str(sd.config))
    assert refused.value.hint


def test_an_adapter_and_a_file_cut_short_are_no_models(
    sd: Single, sd_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "m.safetensors"
    save_file(sd_adapter(sd_directory, 0, ["to_q"], encoder=False), file)
    with pytest.raises(ModelLoadFailed, match="is an adapter") as refused:
        described(file, config=str(sd.config))
    assert "adapters" in refused.value.hint
    file.write_bytes(sd.file.read_bytes()[:-100])
    with pytest.raises(ModelLoadFailed, match="is cut short"):
        described(file, config=str(sd.config))


def test_what_is_missing_beside_a_file_is_asked_for(
    sd: Single, sdxl: Single, sd_directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadFailed, match="no configuration was named") as refused:
        described(sd.file)
    assert "config" in refused.value.hint
    with pytest.raises(ModelLoadFailed, match="hub cache"):
        described(sd.file, config="nobody/nothing")
    empty = tmp_path / "config"
    shutil.copytree(sd.config, empty)
    (empty / "unet" / "config.json").unlink()
    with pytest.raises(ModelLoadFailed, match=r"has no config\.json"):
        described(sd.file, config=str(empty))
    with pytest.raises(InvalidRequest, match="goes with a single-file checkpoint"):
        described(sd_directory, config=str(sd.config))
    with pytest.raises(InvalidRequest, match="no component 'unett'"):
        described(sd_directory, components={"unett": {"source": str(sd.file)}})


@pytest.mark.parametrize(
    "options",
    [{"config": "relative/path/too"}, {"components": {"unet": {"source": "unet.safetensors"}}}],
)
def test_relative_paths_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OffloadError, match="not an absolute path"):
        model_spec("m", "/m.safetensors", options)
