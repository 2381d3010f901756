"""Where the executor lets members of a sweep wait for each other; everyone else passes through.

The executor asks at four places, in the thread that calls the module. A thread that is no member's
is answered at once, as if it were alone, so that one gate serves both.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class SweepMember(Protocol):
    """One member's side of the gate; called in the member's own thread, which has the baton."""

    @property
    def sharers(self) -> int:
        """With how many members the pass that this one takes part in began."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether another member has entered that pass before."""
        ...

    def on_border(self, component: str) -> None:
        """Whatever the member has to do at a border; raises to end its forward."""
        ...

    def wait_at_root(self, component: str) -> None: ...

    def may_enter(self, component: str) -> bool: ...

    def enter(self, component: str, known: Sequence[int]) -> bool: ...

    def wait_at_group(self, component: str, group: int, *, is_there: bool) -> bool: ...

    def leave_root(self, component: str) -> bool: ...

    def wait_behind(self, component: str) -> None: ...


class SweepGate:
    """The gate of one executor; `member` is that of the calling thread, None for all others."""

    def __init__(self) -> None:
        self._threads = threading.local()

    @property
    def member(self) -> SweepMember | None:
        return getattr(self._threads, "member", None)

    @member.setter
    def member(self, member: SweepMember | None) -> None:
        self._threads.member = member

    @property
    def sharers(self) -> int:
        """How many do what the calling thread does now, each group in turn; 1 if nobody else."""
        member = self.member
        return 1 if member is None else member.sharers

    @property
    def has_begun(self) -> bool:
        """Whether the step that the calling thread is about to enter is under way already."""
        member = self.member
        return member is not None and member.has_begun

    def wait_at_root(self, component: str) -> None:
        """Before a root's forward begins."""
        if (member := self.member) is not None:
            member.wait_at_root(component)

    def on_border(self, component: str) -> None:
        """What a member has to do at a border, beside what the executor's user has."""
        if (member := self.member) is not None:
            member.on_border(component)

    def may_enter(self, component: str) -> bool:
        """Whether the calling thread's pass has begun; not if it has left and come back since."""
        member = self.member
        return member is None or member.may_enter(component)

    def enter(self, component: str, known: Sequence[int]) -> bool:
        """The forward begins; says whether no other member is in the same pass already.

        `known` is the order of groups of the component's last step.
        """
        member = self.member
        return member is None or member.enter(component, known)

    def wait_at_group(self, component: str, group: int, *, is_there: bool) -> bool:
        """Before a group is used; where `is_there`, using it takes nothing from anybody.

        Says whether this is new in the step, no other member having come so far before.
        """
        member = self.member
        return member is None or member.wait_at_group(component, group, is_there=is_there)

    def leave_root(self, component: str) -> bool:
        """The forward returned; says whether no other member is in the same pass still."""
        member = self.member
        return member is None or member.leave_root(component)

    def wait_behind(self, component: str) -> None:
        """After `leave_root` and what follows from it: until the others have left as well."""
        if (member := self.member) is not None:
            member.wait_behind(component)
