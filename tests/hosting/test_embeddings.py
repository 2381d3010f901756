"""Text encoders that answer from what they gave before: the same numbers, for their owner alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosting.families import FAMILIES
from hosting.hosting_help import (
    SEED,
    Drawn,
    call_arguments,
    host,
    new_device_host,
    run,
    same_values,
)
from hosting.tiny_adapter_files import ATTENTION, plain_with, save_adapter, sd_adapter
from hosting.tiny_parts import clip_encoder, filled, t5_encoder
from offload.rig import simulated_device
from torch import nn

from offload_protocol.errors import Cancelled
from offload_protocol.messages import AdapterChoice
from offloadd.hosting.device_host import DeviceHost, accelerator_for
from offloadd.hosting.embeddings.answers import Answer
from offloadd.hosting.embeddings.encoder_state import Held
from offloadd.hosting.embeddings.reuse import MOST_CHANGES, EncoderReuse
from offloadd.hosting.embeddings.store import EmbeddingStore
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.running.arguments import prepare_call
from offloadd.hosting.running.aside import JobAside
from offloadd.offload.streaming.occupancy import Occupancy

LIMIT_BYTES = 1 << 24
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning"),
]


def same(here: Any, there: Any) -> None:
    """Both hold the same tensors."""
    same_values(_as_arrays(here), _as_arrays(there))


def _as_arrays(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_arrays(one) for one in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value


def new_host(limit_bytes: int = LIMIT_BYTES) -> DeviceHost:
    on = new_device_host(simulated_device())
    on.embeddings.set_limit(limit_bytes)
    return on


def draw(
    model: HostedModel,
    owner: str | None = "me",
    seed: int = SEED,
    *,
    at_root: Callable[[JobAside], None] | None = None,
    at_border: Callable[[], None] = lambda: None,
    adapters: dict[str, float] | None = None,
    **changes: Any,
) -> Drawn:
    description = model.description
    arguments = call_arguments(description.files.directory, **changes)
    call = prepare_call(arguments, description.parameters, seed, model.device, description.dtype)
    worn = [AdapterChoice(name=name, weight=one) for name, one in (adapters or {}).items()]
    images: Drawn = model.run(
        call, lambda *_: None, at_border, at_root, adapters=worn, owner=owner
    )["images"]
    return images


@contextmanager
def brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The components of which anything is moved to the device meanwhile."""
    names: set[str] = set()
    start = Occupancy._start

    def noted(self: Any, group: Any, region: Any) -> Any:
        names.add(group.component.rpartition("/")[2])
        return start(self, group, region)

    with monkeypatch.context() as patched:
        patched.setattr(Occupancy, "_start", noted)
        yield names


@pytest.mark.parametrize(
    ("name", "changes"),
    [("sdxl", {"clip_skip": 1}), ("flux", {}), ("wan", {}), ("qwen_image", {})],
)
def test_the_same_prompt_with_another_seed_moves_nothing_of_any_encoder(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path)
    on = new_host()
    model = host(tmp_path, on=on, offload="sequential")
    encoders = {one.name for one in model.components() if one.name in ENCODERS}
    arguments = family.arguments(**changes)
    expected = run(model, arguments, seed=7)
    with brought(monkeypatch) as first:
        run(model, arguments, owner="me")
    first_bytes = model.moved_bytes
    assert encoders <= first
    with brought(monkeypatch) as second:
        outputs = run(model, arguments, seed=7, owner="me")
    assert not encoders & second
    assert 0 < model.moved_bytes < first_bytes
    for key, value in expected.items():
        same_values(outputs[key], value)
    model.unload()


def test_another_owner_with_the_same_prompt_has_nothing_of_it(
    sd_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = new_host()
    model = host(sd_directory, on=on, offload="sequential")
    first = draw(model, "uid:1")
    computed = on.embeddings.figures().misses
    with brought(monkeypatch) as moved:
        np.testing.assert_array_equal(draw(model, "uid:2"), first)
    assert "text_encoder" in moved
    assert on.embeddings.figures().misses == 2 * computed
    assert on.embeddings.figures().hits == 0
    np.testing.assert_array_equal(draw(model, "uid:1"), first)
    assert on.embeddings.figures().hits == computed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator is here")
@pytest.mark.parametrize("offload", ["none", "sequential"])
def test_answers_come_back_to_an_accelerator_as_they_were(sd_directory: Path, offload: str) -> None:
    on = new_device_host(accelerator_for(torch.device("cuda", 0)))
    on.embeddings.set_limit(LIMIT_BYTES)
    model = host(sd_directory, on.device, on=on, offload=offload)
    expected = draw(model, None)
    for _ in range(3):
        np.testing.assert_array_equal(draw(model), expected)
    figures = on.embeddings.figures()
    assert figures.hits == 2 * figures.misses
    model.unload()


def test_it_is_off_without_an_owner_without_memory_and_by_the_models_own_switch(
    sd_directory: Path, references: dict[Path, Drawn]
) -> None:
    on = new_host(0)
    models = [host(sd_directory, on=on), host(sd_directory, on=on, reuse_embeddings=False)]
    for model in models:
        for _ in range(2):
            np.testing.assert_array_equal(draw(model), references[sd_directory])
        on.embeddings.set_limit(LIMIT_BYTES)
        draw(models[0], None)
    draw(models[1])
    figures = on.embeddings.figures()
    assert (figures.entries, figures.hits, figures.misses) == (0, 0, 0)


CALLS: dict[str, dict[str, Any]] = {
    "batch": {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2},
    "negative prompt": {"negative_prompt": "a dog"},
    "no guidance": {"guidance_scale": 1.0},
}


def test_calls_of_all_kinds_have_their_own_answers(sd_directory: Path) -> None:
    on = new_host()
    model = host(sd_directory, on=on)
    expected = {name: draw(model, None, **call) for name, call in CALLS.items()}
    for _ in range(2):
        for name, call in CALLS.items():
            np.testing.assert_array_equal(draw(model, **call), expected[name])
    once = on.embeddings.figures()
    for name, call in CALLS.items():
        np.testing.assert_array_equal(draw(model, **call), expected[name])
    assert on.embeddings.figures().misses == once.misses
    # A prompt, another against it, two prompts at once and nothing against these: none twice.
    assert on.embeddings.figures().entries == 4


def test_case_10_adapters_have_their_own_answers(
    sd_directory: Path, references: dict[Path, Drawn], tmp_path: Path
) -> None:
    state = sd_adapter(sd_directory, 1, ATTENTION, encoder=True)
    files = {"ink": save_adapter(tmp_path / "ink.safetensors", state)}
    on = new_host()
    entry = [{"name": "ink", "source": str(files["ink"])}]
    model = host(sd_directory, on=on, adapters=entry, offload="sequential")
    plain = references[sd_directory]
    expected = {weight: plain_with(sd_directory, files, {"ink": weight}) for weight in (0.8, 0.4)}
    for _ in range(2):
        np.testing.assert_array_equal(draw(model), plain)
        for weight, picture in expected.items():
            np.testing.assert_array_equal(draw(model, adapters={"ink": weight}), picture)
    # A model that wears nothing answers as before it had adapters: each was computed once.
    counted = on.embeddings.figures().misses
    np.testing.assert_array_equal(draw(model, adapters={"ink": 0.8}), expected[0.8])
    np.testing.assert_array_equal(draw(model), plain)
    assert on.embeddings.figures().misses == counted
    # A scale for the length of a call, which is no setting of the request's adapters.
    scaled = draw(model, None, adapters={"ink": 0.8}, cross_attention_kwargs={"scale": 0.25})
    assert not np.array_equal(scaled, expected[0.8])
    for _ in range(2):
        again = draw(model, adapters={"ink": 0.8}, cross_attention_kwargs={"scale": 0.25})
        np.testing.assert_array_equal(again, scaled)
    assert on.embeddings.figures().misses > counted
    # When the model comes back, so may another file.
    model.rest()
    assert on.embeddings.figures().entries == 0


def test_a_cancelled_or_failed_call_leaves_nothing(sd_directory: Path) -> None:
    on = new_host()
    model = host(sd_directory, on=on, offload="sequential")

    def cancel() -> None:
        raise Cancelled("stop")

    with pytest.raises(Cancelled):
        draw(model, at_border=cancel)
    assert on.embeddings.figures().entries == 0

    encoder = model._pipeline.text_encoder
    broken = encoder.text_model.final_layer_norm if hasattr(encoder, "text_model") else None
    norm = broken or encoder.final_layer_norm
    forward = type(norm).forward
    try:
        type(norm).forward = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            draw(model)
    finally:
        type(norm).forward = forward
    assert on.embeddings.figures().entries == 0


def test_jobs_that_give_way_to_each_other_share_what_is_theirs(
    sd_directory: Path, references: dict[Path, Drawn]
) -> None:
    on = new_host()
    model = host(sd_directory, on=on, offload="sequential")
    seen: list[Drawn] = []

    def others(aside: JobAside) -> None:
        assert aside.leave() is not None
        seen.append(draw(model, "me"))
        aside.come_back()

    for _ in range(2):
        np.testing.assert_array_equal(draw(model, at_root=others), references[sd_directory])
    for drawn in seen:
        np.testing.assert_array_equal(drawn, references[sd_directory])
    assert on.embeddings.figures().hits > len(seen)


def test_a_model_in_another_dtype_has_its_own_answers(sd_directory: Path) -> None:
    on = new_host()
    model = host(sd_directory, on=on)
    tokens = torch.tensor([[0, 5, 6, 1]])
    encoder = model._pipeline.text_encoder

    def encoded() -> torch.Tensor:
        with torch.no_grad(), model._reuse.on_behalf("me"):
            found: torch.Tensor = encoder(tokens).last_hidden_state
        return found

    assert encoded().dtype == torch.float32
    encoder.to(torch.float64)
    assert encoded().dtype == torch.float64
    assert encoded().dtype == torch.float64
    encoder.to(torch.float32)
    assert encoded().dtype == torch.float32
    figures = on.embeddings.figures()
    assert (figures.misses, figures.hits) == (2, 2)


@dataclass
class Bench:
    """An encoder by itself, in plain memory."""

    module: Any
    store: EmbeddingStore
    reuse: EncoderReuse

    @classmethod
    def of(cls, module: nn.Module, limit_bytes: int = LIMIT_BYTES) -> Bench:
        store = EmbeddingStore(limit_bytes)
        return cls(module, store, EncoderReuse(store, {"encoder": module}, CPU))

    def __call__(self, *args: Any, owner: str | None = "me", **kwargs: Any) -> Any:
        with torch.no_grad(), self.reuse.on_behalf(owner):
            return self.module(*args, **kwargs)

    @property
    def counts(self) -> tuple[int, int]:
        figures = self.store.figures()
        return figures.hits, figures.misses


TOKENS = torch.tensor([[0, 5, 9, 7, 1]])


ENCODER_KINDS: tuple[Callable[[], nn.Module], ...] = (clip_encoder, t5_encoder)


@pytest.fixture(params=ENCODER_KINDS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench.of(filled(request.param(), 3))


def test_an_answer_reads_as_the_encoders_own_in_every_way(bench: Bench) -> None:
    asks: tuple[dict[str, Any], ...] = ({}, {"output_hidden_states": True})
    for ask in asks:
        plain = bench(TOKENS, owner=None, **ask)
        for _ in range(2):
            found = bench(TOKENS, **ask)
            assert isinstance(found, type(plain))
            assert type(found).__name__ == type(plain).__name__
            assert list(found) == list(plain.keys())
            assert len(found) == len(plain)
            assert "last_hidden_state" in found
            same(found.to_tuple(), plain.to_tuple())
            same(found[0], plain[0])
            same(found[:1], plain[:1])
            same(found["last_hidden_state"], plain["last_hidden_state"])
            same(list(found.values()), list(plain.values()))
            assert found.get("nothing", 3) == 3
            assert found.attentions is None
            with pytest.raises(KeyError):
                found["attentions"]
            with pytest.raises(AttributeError):
                found.nothing  # noqa: B018 - reading it is the test
    states = bench(TOKENS, output_hidden_states=True).hidden_states
    assert isinstance(states, tuple)
    same(torch.stack(states), torch.stack(plain.hidden_states))
    same(torch.cat(states[1:], dim=-1), torch.cat(plain.hidden_states[1:], dim=-1))
    same(((TOKENS, *states))[-1], plain.hidden_states[-1])
    same(((TOKENS,) + states)[2], plain.hidden_states[1])  # noqa: RUF005 - that it can be added
    same((states + (TOKENS,))[-2], plain.hidden_states[-1])  # noqa: RUF005


def test_no_more_is_kept_than_is_read_and_what_is_read_later_is_added(bench: Bench) -> None:
    plain = bench(TOKENS, owner=None, output_hidden_states=True)
    one_bytes = plain.hidden_states[1].nbytes
    bench(TOKENS, output_hidden_states=True)
    empty_bytes = bench.store.figures().size_bytes
    for _ in range(2):
        same(bench(TOKENS, output_hidden_states=True).hidden_states[-2], plain.hidden_states[-2])
    assert bench.store.figures().size_bytes == empty_bytes + one_bytes
    # A torch function takes all of them by itself, before and after they are kept.
    for _ in range(2):
        states = bench(TOKENS, output_hidden_states=True).hidden_states
        same(torch.stack(states), torch.stack(plain.hidden_states))
    count = len({id(one) for one in plain.hidden_states})
    assert bench.store.figures().size_bytes == empty_bytes + count * one_bytes


def test_what_a_reader_writes_shows_in_no_other_answer(bench: Bench) -> None:
    plain = bench(TOKENS, owner=None).last_hidden_state.clone()
    for _ in range(3):
        found = bench(TOKENS)
        same(found.last_hidden_state, plain)
        found.last_hidden_state.mul_(0.0)
        # It is its own to itself.
        assert found[0].abs().max() == 0
        found.last_hidden_state = None
        assert found.last_hidden_state is None
    assert bench.counts == (2, 1)


def test_what_was_written_into_before_it_was_read_is_not_kept(bench: Bench) -> None:
    plain = bench(TOKENS, owner=None, output_hidden_states=True)
    found = bench(TOKENS, output_hidden_states=True)
    real = found._reading._fresh[found._reading.form.fields["hidden_states"][1]][0]
    real.add_(1.0)
    assert not torch.equal(found.hidden_states[1], plain.hidden_states[1])
    assert bench.store.figures().entries == 0
    same(bench(TOKENS, output_hidden_states=True).hidden_states[1], plain.hidden_states[1])


def test_what_was_one_tensor_is_one_in_the_answer(bench: Bench) -> None:
    plain = bench(TOKENS, owner=None, output_hidden_states=True)
    is_one = plain.hidden_states[-1].data_ptr() == plain.last_hidden_state.data_ptr()
    for _ in range(2):
        found = bench(TOKENS, output_hidden_states=True)
        found.hidden_states[-1].zero_()
        assert (found.last_hidden_state.abs().max() == 0) == is_one


def test_an_answer_that_nobody_holds_is_gone_at_once(bench: Bench) -> None:
    gc.disable()
    try:
        for _ in range(2):
            found = bench(TOKENS, output_hidden_states=True)
            state, states = found.hidden_states[1], found.hidden_states
            torch.stack(states)
            gone = [weakref.ref(one) for one in (found, found._reading, states[0], states[-1])]
            del found, states
            assert [one() for one in gone] == [None] * len(gone)
            assert state.abs().max() > 0
    finally:
        gc.enable()


def test_other_inputs_settings_and_owners_are_other_calls(bench: Bench) -> None:
    mask = torch.ones_like(TOKENS)
    asked: list[tuple[Any, ...]] = [
        ((TOKENS,), {}),
        ((TOKENS + 1,), {}),
        ((TOKENS.int(),), {}),
        ((TOKENS[:, :4],), {}),
        ((TOKENS, mask), {}),
        ((), {"input_ids": TOKENS}),
        ((TOKENS,), {"output_hidden_states": True}),
        ((TOKENS,), {"owner": "you"}),
    ]
    for number, (args, kwargs) in enumerate(asked, 1):
        same(bench(*args, **kwargs)[0], bench(*args, **{**kwargs, "owner": None})[0])
        assert bench.counts == (0, number)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        bench(TOKENS)[0]
    finally:
        torch.set_num_threads(threads)
    assert bench.counts == (0, len(asked) + 1)


def test_what_may_not_be_compared_is_computed(bench: Bench) -> None:
    class Strange(torch.Tensor):
        pass

    def watch(module: nn.Module, args: Any, result: Any) -> None:
        heard.append(module)

    heard: list[nn.Module] = []
    for _ in range(2):
        bench(TOKENS.as_subclass(Strange))
        with torch.enable_grad(), bench.reuse.on_behalf("me"):
            bench.module(TOKENS)
    hook = list(bench.module.children())[-1].register_forward_hook(watch)
    for _ in range(2):
        bench(TOKENS)
    assert len(heard) == 2
    hook.remove()
    bench(TOKENS, return_dict=False)
    bench(TOKENS, return_dict=False)
    assert bench.store.figures().entries == 0


def test_an_encoder_that_keeps_state_or_draws_is_not_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type(clip_encoder())
    forward = kind.forward

    def stateful(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.latest = torch.ones(1)
        return forward(self, *args, **kwargs)

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return forward(self, *args, **kwargs)

    for changed in (stateful, drawing):
        bench = Bench.of(filled(clip_encoder(), 3))
        bench(TOKENS)[0]
        monkeypatch.setattr(kind, "forward", changed)
        for _ in range(MOST_CHANGES):
            # An answer from before a state changed would be one of the wrong state.
            assert not isinstance(bench(TOKENS + 1), Answer)
            assert bench.store.figures().entries == 0
        monkeypatch.setattr(kind, "forward", forward)
        assert not isinstance(bench(TOKENS), Answer)


def test_modules_that_are_no_text_encoders_are_left_alone() -> None:
    store = EmbeddingStore(LIMIT_BYTES)
    training = clip_encoder().train()
    reuse = EncoderReuse(store, {"linear": nn.Linear(2, 2), "training": training}, CPU)
    assert "_compiled_call_impl" not in vars(training)
    reuse.close()


def test_closing_leaves_the_module_as_it_was() -> None:
    bench = Bench.of(filled(clip_encoder(), 3))
    bench(TOKENS)[0]
    bench.reuse.close()
    assert "_compiled_call_impl" not in vars(bench.module)
    assert bench.store.figures().entries == 0
    assert not isinstance(bench(TOKENS), Answer)


def test_settings_that_are_set_again_as_they_were_are_no_change_of_an_encoder() -> None:
    """As the adapters of jobs that go on in turn are, between the entry of a call and its work."""
    encoder = nn.Linear(2, 2)
    changed: Any = encoder
    marks = torch.ones(2)
    changed.active = ["ink", (1, marks)]
    before = Held.now(encoder, CPU)
    changed.active = ["ink", (1, marks)]
    assert not Held.now(encoder, CPU).differs_from(before)
    for other in (["oil", (1, marks)], ["ink"], ["ink", (1, torch.ones(2))], ("ink", (1, marks))):
        changed.active = other
        assert Held.now(encoder, CPU).differs_from(before)
