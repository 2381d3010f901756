"""Which groups come next, across the steps and the components of a pipeline; a hint only.

Within a component the order of its last step counts (`order`). After a step, what followed last
time after as many steps of that component in a row is expected again: twenty steps of a denoiser,
then the decoder. A wrong guess costs the bytes it prefetched, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from offloadd.offload.streaming.order import StepOrder


class Prediction:
    """The orders of all components, by name, and how their steps follow each other.

    A step is begun and finished by the root's forward. Groups acquired outside of one (a decoder
    called by another method) make up a step of their own, which ends where it starts again or where
    another component starts.
    """

    def __init__(self) -> None:
        self._orders: dict[str, StepOrder[int]] = {}
        self._follows: dict[tuple[str, int], str] = {}
        self._current: str | None = None
        self._in_a_row = 0
        self._under_way = False
        self._rootless_start: int | None = None

    def add(self, component: str) -> None:
        self._orders[component] = StepOrder()

    def remove(self, component: str) -> None:
        del self._orders[component]
        self._follows = {
            key: name for key, name in self._follows.items() if component not in (key[0], name)
        }
        if self._current == component:
            self._current, self._in_a_row, self._under_way = None, 0, False
            self._rootless_start = None

    @property
    def running(self) -> str | None:
        """The component whose step is under way."""
        return self._current if self._under_way else None

    def known(self, component: str) -> tuple[int, ...]:
        """The groups of the component's last whole step, in order."""
        return self._orders[component].known

    def begin(self, component: str) -> None:
        """A root's forward starts."""
        self._end_rootless()
        self._follow(component)
        self._under_way = True
        self._orders[component].begin()

    def finish(self, component: str) -> None:
        """A root's forward returned; one that raised is left out, and begun anew by the next."""
        self._orders[component].finish()
        if component == self._current:
            self._under_way = False

    def skip(self, component: str) -> None:
        """A step of the component that may be expected next does not come; what follows it does."""
        if self._current is None:
            return
        here = self._current, self._in_a_row
        if self._follows.get(here, self._current) != component:
            return
        done = self._in_a_row if component == self._current else 0
        rows = [row for name, row in self._follows if name == component and row > done]
        if rows:
            self._follows[here] = self._follows[component, min(rows)]
        else:
            self._follows.pop(here, None)

    def acquire(self, component: str, group: int) -> bool:
        """A group is needed now; says whether a step outside of any root's forward starts here."""
        starts_again = group == self._rootless_start and self._orders[component].recorded_length > 1
        starts = component != self._current or not self._under_way or starts_again
        if starts:
            self._end_rootless()
            self._follow(component)
            self._under_way = True
            self._rootless_start = group
            self._orders[component].begin()
        self._orders[component].acquire(group)
        return starts

    def upcoming(self, count: int) -> Iterator[tuple[str, int]]:
        """Up to `count` groups expected next, with the component that each belongs to."""
        name, in_a_row = self._current, self._in_a_row
        if name is None:
            return
        if self._under_way:
            order = self._orders[name]
            for group in order.upcoming(min(count, order.remaining)):
                count -= 1
                yield name, group
        while count > 0:
            follower = self._follows.get((name, in_a_row), name)
            in_a_row = in_a_row + 1 if follower == name else 1
            name = follower
            known = self._orders[name].known[:count]
            if not known:
                return
            for group in known:
                yield name, group
            count -= len(known)

    def _end_rootless(self) -> None:
        if self._rootless_start is not None and self._current is not None:
            self._orders[self._current].finish()
        self._rootless_start = None
        self._under_way = False

    def _follow(self, component: str) -> None:
        if self._current is not None:
            if component == self._current:
                self._follows.pop((component, self._in_a_row), None)
            else:
                self._follows[self._current, self._in_a_row] = component
        self._in_a_row = self._in_a_row + 1 if component == self._current else 1
        self._current = component
