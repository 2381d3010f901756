"""Whoever takes part in a sweep, in whatever order: one computes at a time, and all get through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.sweep.places import PlaceCursor
from offloadd.offload.sweep.rules import SweepRules

KNOWN = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Own:
    """Work outside the component: stretches, each as long as it says, with borders between."""

    stretches_s: Sequence[int]


@dataclass(frozen=True)
class Walk:
    """One forward, through these groups; it raises at the end where it does not return."""

    groups: Sequence[int]
    component: str = "denoiser"
    returns: bool = True


Script = Sequence[Own | Walk]


@dataclass
class Play:
    """Runs scripts by the rules, on a clock of its own, and notes who did what."""

    scripts: dict[str, Script]
    rules: SweepRules = field(default_factory=SweepRules)
    now_s: float = 0.0
    walked: list[tuple[int, str, str, int]] = field(default_factory=list)
    """Pass, member, component and group, in the order of computing."""
    waits: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """When each member came to a root, and when it could enter."""
    charged_s: float = 0.0

    def run(self) -> None:
        acts = {name: self._act(name, script) for name, script in self.scripts.items()}
        for name in self.scripts:
            self.rules.join(name, self.now_s)
        while (chosen := self.rules.choose(self.now_s)) is not None:
            self._check(chosen)
            if next(acts[chosen], None) is None:
                self.charged_s += self.rules.end(chosen, self.now_s)
        assert self.rules.members == (), "nobody is left standing"

    def _act(self, name: str, script: Script) -> Iterator[bool]:
        for part in script:
            if isinstance(part, Own):
                yield from self._own(name, part)
            else:
                yield from self._walk(name, part)

    def _own(self, name: str, part: Own) -> Iterator[bool]:
        for stretch_s in part.stretches_s:
            self.rules.own_border(name, self.now_s)
            yield True
            assert not self.rules.is_in_pass, "own work lies in the middle of a pass"
            self.now_s += stretch_s

    def _walk(self, name: str, part: Walk) -> Iterator[bool]:
        came_s = self.now_s
        self.rules.at_root(name, part.component, came_s)
        yield True
        self.waits.setdefault(name, []).append((came_s, self.now_s))
        self.rules.enter(name)
        cursor = PlaceCursor(KNOWN)
        for group in part.groups:
            assert self.rules.at_group(name, part.component, cursor.acquire(group))
            yield True
            self.walked.append((self.rules.passes, name, part.component, group))
            self.now_s += 1
        if part.returns:
            self.rules.leave_root(name, part.component, self.now_s)
            yield True

    def _check(self, name: str) -> None:
        under_way = self.rules._pass
        if under_way is not None:
            places = {one: self.rules._standings[one].place for one in under_way.going}
            assert places[name] == min(places.values()), "somebody further behind was left waiting"

    def loads(self) -> int:
        """How often a ring of one group has to be filled."""
        groups = [(component, group) for _, _, component, group in self.walked]
        return len(groups) and 1 + sum(one != other for one, other in pairwise(groups))


def _in_order(steps: int, own_s: int = 1) -> Script:
    return [Own([own_s]), *(part for _ in range(steps) for part in (Walk(KNOWN), Own([1])))]


def _go_to_the_root(rules: SweepRules, members: int) -> None:
    for _ in range(members):
        chosen = rules.choose(0.0)
        assert chosen is not None
        rules.at_root(chosen, "denoiser", 0.0)


own_parts = st.builds(Own, st.lists(st.integers(0, 9), max_size=3))
walk_parts = st.builds(
    Walk,
    st.lists(st.integers(0, 6), max_size=8) | st.just(KNOWN),
    st.sampled_from(["denoiser", "encoder"]),
    st.booleans(),
)
scripts = st.lists(own_parts | walk_parts, max_size=6)


@given(st.lists(scripts, max_size=6))
def test_all_get_through_one_at_a_time_whatever_they_do(all_scripts: list[Script]) -> None:
    play = Play({f"job {number}": script for number, script in enumerate(all_scripts)})
    play.run()
    wanted = sorted(
        (name, part.component, group)
        for name, script in play.scripts.items()
        for part in script
        if isinstance(part, Walk)
        for group in part.groups
    )
    assert sorted((name, component, group) for _, name, component, group in play.walked) == wanted


@given(st.lists(scripts, max_size=6))
def test_the_seconds_charged_are_those_that_went_by(all_scripts: list[Script]) -> None:
    play = Play({f"job {number}": script for number, script in enumerate(all_scripts)})
    play.run()
    assert abs(play.charged_s - play.now_s) < 1e-6


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_members_in_one_order_need_each_group_once_a_pass(steps: list[int]) -> None:
    play = Play({f"job {number}": _in_order(count) for number, count in enumerate(steps)})
    play.run()
    assert play.loads() == max(steps) * len(KNOWN)
    assert play.rules.passes == max(steps)


@given(st.integers(1, 6), st.integers(0, 6))
def test_whoever_skips_groups_costs_the_others_no_load(first: int, length: int) -> None:
    skipping = [g for g in KNOWN if not first <= g < first + length]
    play = Play({"a": [Walk(KNOWN)], "b": [Walk(skipping)], "c": [Walk(KNOWN)]})
    play.run()
    assert play.loads() == len(KNOWN)


def test_whoever_goes_backwards_brings_its_groups_for_itself() -> None:
    play = Play({"a": [Walk(KNOWN)], "b": [Walk(KNOWN[::-1])], "c": [Walk(KNOWN)]})
    play.run()
    assert play.loads() <= 2 * len(KNOWN)


def test_a_member_whose_forward_raises_is_waited_for_no_longer() -> None:
    failing: Script = [Own([1]), Walk([0, 1], returns=False), Own([5]), Walk(KNOWN)]
    play = Play({"a": _in_order(2), "failing": failing})
    play.run()
    assert {group for number, name, _, group in play.walked if (number, name) == (1, "a")} == {
        *KNOWN
    }
    assert play.loads() == 2 * len(KNOWN), "and for its next pass it is there again"


def test_own_work_goes_first_so_that_more_share_the_pass() -> None:
    play = Play({"a": _in_order(1), "b": _in_order(1, own_s=50)})
    play.run()
    assert play.rules.shared_passes == 1


@given(st.lists(st.integers(1, 5), min_size=5, max_size=30))
def test_own_work_holds_others_up_for_no_longer_than_a_pass_and_a_stretch(
    stretches_s: list[int],
) -> None:
    play = Play({"a": _in_order(9), "busy": [Walk(KNOWN), Own(stretches_s)]})
    play.run()
    # A pass of both takes ten seconds, one of `a` alone five; at first one waits for the other.
    waits_s = [begun - came for came, begun in play.waits["a"][1:]]
    assert max(waits_s) <= 10 + max(stretches_s)


def test_the_pass_is_for_whoever_waits_longest_and_both_components_get_theirs() -> None:
    encoding: list[Own | Walk] = [
        part for _ in range(3) for part in (Walk(KNOWN, "encoder"), Own([1]))
    ]
    play = Play({"a": _in_order(3, own_s=0), "b": encoding})
    play.run()
    passes = dict.fromkeys((number, component) for number, _, component, _ in play.walked)
    assert [component for _, component in passes] == ["encoder", "denoiser"] * 3


def test_a_component_without_a_plan_is_passed_one_at_a_time() -> None:
    play = Play({"a": _in_order(1), "b": _in_order(1)}, SweepRules(limit=lambda component: 1))
    play.run()
    assert (play.rules.passes, play.rules.shared_passes) == (2, 0)


def test_a_pause_comes_between_passes_and_nobody_loses_its_place() -> None:
    rules = SweepRules()
    rules.join("a", 0.0)
    assert rules.choose(0.0) == "a"
    rules.at_root("a", "denoiser", 1.0)
    assert rules.choose(1.0, pause=True) is None
    assert rules.used_s("a") == 1.0
    assert rules.choose(50.0) == "a"
    assert rules.enter("a")
    rules.at_group("a", "denoiser", (0, 0))
    assert rules.choose(51.0, pause=True) == "a", "a pass is not broken off"
    assert rules.used_s("a") == 2.0, "what the owner does meanwhile is not the member's"


def test_whoever_is_to_stop_goes_first_even_in_a_pause() -> None:
    rules = SweepRules()
    for name in ("a", "b"):
        rules.join(name, 0.0)
    _go_to_the_root(rules, 2)
    rules.hurry("b")
    assert rules.choose(1.0, pause=True) == "b"
    assert not rules.may_enter("b"), "it has the device to stop, not to go on"
    rules.end("b", 1.0)
    assert rules.choose(1.0, pause=True) is None
    rules.hurry("b")
    assert rules.choose(1.0) == "a"
    assert rules.may_enter("a")


@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 4), max_size=12))
def test_members_that_do_the_same_have_the_same_places(known: list[int], groups: list[int]) -> None:
    one, other = PlaceCursor(known), PlaceCursor(known)
    assert [one.acquire(group) for group in groups] == [other.acquire(group) for group in groups]


def test_places_grow_along_the_order_and_beside_it_and_fall_on_the_way_back() -> None:
    cursor = PlaceCursor((0, 1, 2, 0))
    assert [cursor.acquire(group) for group in (0, 0, 7, 8, 2, 0)] == [
        *((0, 0), (0, 0), (0, 1), (0, 2), (2, 0), (3, 0))
    ]
    assert cursor.acquire(1) == (1, 0)


def test_the_first_at_each_place_leads() -> None:
    rules = SweepRules()
    for name in ("a", "b"):
        rules.join(name, 0.0)
    _go_to_the_root(rules, 2)
    assert rules.choose(0.0) == "b"
    rules.enter("b")
    rules.at_group("b", "denoiser", (0, 0))
    assert rules.leads("b")
    rules.at_group("b", "denoiser", (1, 0))
    assert rules.choose(0.0) == "a"
    rules.enter("a")
    rules.at_group("a", "denoiser", (0, 0))
    assert not rules.leads("a")
    rules.at_group("a", "denoiser", (1, 0))
    assert rules.leads("a")
    assert not rules.leads("b")


def test_whoever_is_to_be_alone_shares_no_pass_and_waits_no_longer_for_it() -> None:
    rules = SweepRules()
    for name in ("a", "b", "c"):
        rules.join(name, 0.0, is_alone=name == "b")
    _go_to_the_root(rules, 3)
    passes: dict[int, list[str]] = {}
    while (chosen := rules.choose(1.0)) is not None and rules.is_in_pass:
        rules.enter(chosen)
        passes.setdefault(rules.passes, []).append(chosen)
        rules.leave_root(chosen, "denoiser", 1.0)
    assert [sorted(names) for names in passes.values()] == [["a", "c"], ["b"]]
