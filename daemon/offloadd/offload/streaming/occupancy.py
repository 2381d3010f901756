"""Which groups have memory on the device, and which give theirs up when another needs it.

Promises: a group that is in use keeps its memory. Groups fetched ahead give way to one that is
needed now, latest guess first. Residents give way to those of a component that has run twice since
theirs ran, least recently used first: components that take turns (text encoder, denoiser, decoder)
would otherwise send away, each time, what is wanted next. Residents under one allowance stay within
it.

Components that take turns have one ring in common (`turns`): what is fetched ahead for the next of
them would be lost if the ring changed between them.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload_protocol.errors import OutOfMemory
from offloadd.offload.planning.allowances import Allowance
from offloadd.offload.streaming.counters import Counters
from offloadd.offload.streaming.streamed import Streamed, StreamedComponent
from offloadd.offload.streaming.tier import DeviceTier, Region
from offloadd.offload.streaming.transfers import Load
from offloadd.offload.streaming.turns import Turns, common_ring_bytes, is_wanted_sooner

RING_TOLERANCE = 1 / 16
"""By how much of the limit the ring may be off when another component starts to run."""


class Occupancy:
    """The groups of all components on one device, and the memory that they have of it.

    `components` are in the order of their last use; `ahead` holds what was fetched and not used
    yet, oldest first.
    """

    def __init__(self, tier: DeviceTier, counters: Counters) -> None:
        self.components: dict[str, StreamedComponent] = {}
        self.ahead: dict[Streamed, None] = {}
        self.group_count = 0
        self._tier = tier
        self._counters = counters
        self._allowances: dict[str, Allowance] = {}
        self._latest: str | None = None
        self._turns = Turns()
        self._ring_bytes = 0

    def add(self, component: str, groups: Iterable[Streamed]) -> None:
        """Take charge of a component's groups, all absent."""
        self.components[component] = added = StreamedComponent(tuple(groups))
        self._latest = self._latest or component
        self.group_count += len(added.groups)

    def remove(self, component: str) -> None:
        """Let a component go; its weights are absent afterwards."""
        for group in self.components[component].groups:
            group.users = 0
            self.drop(group)
        self.group_count -= len(self.components.pop(component).groups)
        if self._latest == component:
            self._latest = next(reversed(self.components), None)
        if not self.components:
            self._tier.set_ring(0)

    def configure(self, component: str, keep: frozenset[int], ring_bytes: int) -> None:
        """See `Executor.configure`."""
        self.components[component].ring_bytes = ring_bytes
        for group in self.components[component].groups:
            group.keep = group.index in keep
            if group.load is not None and not group.users and not group.stays:
                self.drop(group)
        if component == self._latest:
            self._ring_bytes = self._common_ring_bytes()
            self._is_allowed(component, 0)
            self._set_ring(self._ring_bytes)

    def allow(self, component: str, allowance: Allowance | None) -> None:
        """Keep the component's weights, with those of all that share it, within an allowance."""
        self._allowances.pop(component, None)
        if allowance is not None:
            self._allowances[component] = allowance

    def resident_bytes(self, component: str) -> int:
        """Bytes of the component's groups that are on the device to stay."""
        groups = self.components[component].groups
        return sum(group.size_bytes for group in groups if group.stays)

    def drop_unused(self) -> None:
        """Empty the device of all groups that are not in use, residents too."""
        for component in self.components.values():
            for group in component.groups:
                if not group.users:
                    self.drop(group)

    def use(self, component: str) -> None:
        """A step of the component begins; keeps the ring fit for those that take turns with it."""
        self._turns.step(self.components[component])
        if component == self._latest:
            return
        self._latest = component
        used = self.components[component] = self.components.pop(component)
        allowance = self._allowances.get(component)
        common_bytes = self._common_ring_bytes()
        excess = self._tier.ring_bytes - common_bytes
        # A ring that is somewhat too large costs some residents, one too small some depth: both
        # cost less than what was fetched ahead, which is lost when the ring changes.
        tolerance = RING_TOLERANCE * self._tier.limit_bytes
        is_short = self._tier.ring_bytes < used.largest_bytes(passing=True)
        is_over = excess > 0 and allowance is not None
        is_unfit = is_short or is_over or abs(excess) > tolerance
        self._ring_bytes = common_bytes if is_unfit else self._tier.ring_bytes
        self._is_allowed(component, 0)
        self._set_ring(self._ring_bytes)

    def _common_ring_bytes(self) -> int:
        """The ring for those that take turns with the component that runs, under one allowance."""
        if self._latest is None:
            return 0
        allowance = self._allowances.get(self._latest)
        most_bytes = self._room_bytes
        if allowance is not None:
            most_bytes = min(most_bytes, allowance.limit_bytes - allowance.kept_bytes)
        sharing = [
            one for name, one in self.components.items() if self._allowances.get(name) is allowance
        ]
        return common_ring_bytes(
            self.components[self._latest], sharing, most_bytes, self._tier.alignment_bytes
        )

    def fetch_ahead(self, group: Streamed, sooner: set[Streamed]) -> bool:
        """Start to bring a group on a guess, if there is memory; says whether there was.

        Only guesses that are needed later than those in `sooner`, or never, give way to it. Raises
        what the loader raises.
        """
        region = self._region_to_stay(group)
        while region is None:
            region = self._tier.place(group.size_bytes)
            if region is None:
                stale = [other for other in self.ahead if other not in sooner]
                if not stale:
                    return False
                self.drop(stale[-1])
        self._start(group, region)
        return True

    def fetch(self, group: Streamed) -> Load:
        """Bring a group that nobody has fetched ahead; raises OutOfMemory with all plans."""
        self._counters.misses += 1
        region = self._region_to_stay(group)
        while region is None:
            region = self._tier.place(group.size_bytes)
            if region is None and not self.ahead:
                # Groups in use lie in the way, or there is no ring.
                region = self._allocate(group)
            elif region is None:
                self.drop(next(reversed(self.ahead)))
        return self._start(group, region)

    def drop(self, group: Streamed) -> None:
        """Make the group absent and give its memory on."""
        self.ahead.pop(group, None)
        load, group.load = group.load, None
        if load is None:
            return
        load.settle()
        if group.bound:
            group.binding.absent()
            group.bound = False
        if load.region.place is None:
            group.binding.forget()
        self._tier.release(load.region)

    def make_room(
        self, size_bytes: int, for_component: str | None, *, is_needed: bool = True
    ) -> None:
        """Send away residents of components that do not run now, least recently used first.

        Unless it is needed, only of components that are not wanted sooner than this one again.
        """
        for name in list(self.components):
            if name == for_component:
                continue
            if not is_needed and self._is_wanted_sooner(name, for_component):
                continue
            for group in self.components[name].groups:
                if self._tier.room_bytes >= size_bytes:
                    return
                if group.stays and not group.users:
                    self.drop(group)

    def _allocate(self, group: Streamed) -> Region:
        self._is_allowed(group.component, group.size_bytes)
        self.make_room(group.size_bytes, group.component)
        for other in self.components[group.component].groups:
            # Less is free than its plan was made for: slow is better than not at all.
            if self._tier.room_bytes < group.size_bytes and other.stays and not other.users:
                self.drop(other)
        try:
            return self._tier.allocate(group.size_bytes)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"no memory on the device for {group.name!r} of {group.component!r}: "
                f"{error.message}",
                hint=error.hint,
                details=error.details,
            ) from error

    def _region_to_stay(self, group: Streamed) -> Region | None:
        if not group.keep:
            return None
        # A guess sends nobody away who is wanted sooner.
        is_needed = group.size_bytes > self._tier.ring_bytes and group.component == self._latest
        if not self._is_allowed(group.component, group.size_bytes, is_needed=is_needed):
            return None
        self.make_room(group.size_bytes, group.component, is_needed=is_needed)
        if self._tier.room_bytes < group.size_bytes:
            return None
        try:
            return self._tier.allocate(group.size_bytes)
        except OutOfMemory:
            # The device has less than the budget says: the group passes through the ring instead.
            return None

    def _start(self, group: Streamed, region: Region) -> Load:
        try:
            timed = self.components[group.component].trace is not None
            load = group.loader.start(group.start_bytes, group.stop_bytes, region, timed=timed)
        except BaseException:
            self._tier.release(region)
            raise
        self._counters.moved_bytes += group.size_bytes
        group.load = load
        self.ahead[group] = None
        return load

    def _set_ring(self, wanted_bytes: int) -> None:
        if wanted_bytes == self._tier.ring_bytes:
            return
        for group in list(self.ahead):
            if group.load is not None and group.load.region.place is not None:
                self.drop(group)
        groups = [group for component in self.components.values() for group in component.groups]
        if any(group.load and group.load.region.place for group in groups):
            return  # another component is inside its forward
        for group in groups:
            # Also one that stays now may have passed through the ring before.
            group.binding.forget()
        self.make_room(wanted_bytes - self._tier.ring_bytes, None)
        self._tier.set_ring(wanted_bytes)

    def _is_wanted_sooner(self, name: str, than: str | None) -> bool:
        if name == self._latest:
            return True  # it runs, or ran last
        if than is None:
            return False
        others = self.components[than]
        return is_wanted_sooner(self.components[name], others, runs=than == self._latest)

    @property
    def _room_bytes(self) -> int:
        """What residents and ring have together, beside what is kept whatever the plans."""
        resident_bytes = sum(map(self.resident_bytes, self.components))
        return self._tier.room_bytes + resident_bytes + self._tier.ring_bytes

    def _is_allowed(self, component: str, more_bytes: int, *, is_needed: bool = True) -> bool:
        """Whether so much more may stay; residents that share the allowance give way for it.

        For nothing more, but the ring, also those of the component that runs.
        """
        allowance = self._allowances.get(component)
        if allowance is None:
            return True
        sharing = [name for name in self.components if self._allowances.get(name) is allowance]
        excess = allowance.kept_bytes + more_bytes - allowance.limit_bytes
        excess += sum(self.resident_bytes(name) for name in sharing)
        if self._latest in sharing:
            excess += self._ring_bytes
        for name in sharing:
            if more_bytes and name in (component, self._latest):
                continue
            if not is_needed and self._is_wanted_sooner(name, component):
                continue
            for group in self.components[name].groups:
                if excess <= 0:
                    return True
                if group.stays and not group.users:
                    excess -= group.size_bytes
                    self.drop(group)
        return excess <= 0
