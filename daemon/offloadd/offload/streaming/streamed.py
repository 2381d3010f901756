"""A group as the executor drives it: where its bytes are from, and whether it is on the device."""

from __future__ import annotations

from dataclasses import dataclass

from offloadd.offload.planning.trace import StepTrace
from offloadd.offload.streaming.transfers import Load, Loader
from offloadd.offload.weights.binding import Binding


@dataclass(slots=True, eq=False)
class Streamed:
    """One group; `keep` says that it stays once it has come, `users` who computes with it now."""

    component: str
    index: int
    name: str
    start_bytes: int
    stop_bytes: int
    binding: Binding
    loader: Loader
    keep: bool = False
    load: Load | None = None
    bound: bool = False
    users: int = 0

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def stays(self) -> bool:
        """Whether it is on the device in memory of its own that it is to keep."""
        return self.keep and self.load is not None and self.load.region.place is None


@dataclass(slots=True)
class StreamedComponent:
    """The groups of one component, the ring that its plan asks for, and who measures them now.

    `last_step`, the one before it, and the last before its turn count the steps of all components,
    0 is never; `turn_steps` is how many it made in a row in its last whole turn.
    """

    groups: tuple[Streamed, ...]
    ring_bytes: int = 0
    trace: StepTrace | None = None
    last_step: int = 0
    step_before: int = 0
    turn_before: int = 0
    turn_steps: int = 0
    turn_steps_so_far: int = 0

    @property
    def kept_bytes(self) -> int:
        """All groups that are to stay, whether there is room for them or not."""
        return sum(group.size_bytes for group in self.groups if group.keep)

    def largest_bytes(self, *, passing: bool) -> int:
        """The largest of its groups, or of those that are not to stay."""
        groups = (group for group in self.groups if not passing or not group.keep)
        return max((group.size_bytes for group in groups), default=0)
