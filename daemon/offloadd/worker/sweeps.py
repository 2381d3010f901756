"""Lets jobs on one model have the device together: they share each pass of its streamed weights.

The jobs of a room pass the device on among themselves (`offload.sweep` has the rules); for
everybody else the room is one holder of the baton. Promises: a room has the baton while any of its
jobs goes on, lends it to short work between passes, and gives it back when its jobs have ended or
given way, each by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch

from offloadd.hosting.running.global_state import OwnSettings, Randomness
from offloadd.offload.sweep.sweep import SweepRoom
from offloadd.worker.baton import Baton, Waiting


class Hold(Protocol):
    """How one job comes to the device, and lets go of it."""

    def take(self) -> bool:
        """Wait for it; False, and without it, if the wait was given up."""

    def give_back(self) -> None: ...

    def lend(self) -> None:
        """Let short work that waits go first."""

    def give_up(self) -> None:
        """The job is to stop: let it come to where it does, soon. Another thread calls this."""


class BatonHold:
    """By itself."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._waiting = Waiting()

    def take(self) -> bool:
        return self._baton.take_turn(self._waiting)

    def give_back(self) -> None:
        self._baton.give_back()

    def lend(self) -> None:
        self._baton.lend()

    def give_up(self) -> None:
        self._baton.give_up(self._waiting)


class RoomHold:
    """Together with others; with `is_alone` without sharing their passes.

    `wear` lets the model wear the job's adapters and no others; it costs nothing where it does.
    `settings` makes what keeps those of a job whose call changes the modules, anew each time that
    it comes to the device; it shares no passes either.
    """

    def __init__(
        self,
        sweeps: Sweeps,
        room: SweepRoom,
        job: str,
        device: torch.device,
        *,
        wear: Callable[[], None],
        is_alone: bool,
        settings: Callable[[], OwnSettings] | None = None,
    ) -> None:
        self._sweeps = sweeps
        self._room = room
        self._job = job
        self._device = device
        self._wear = wear
        self._settings = settings
        self._is_alone = is_alone or settings is not None
        self._attending = ExitStack()

    def take(self) -> bool:
        self._sweeps.expect(self._room)
        settings = None if self._settings is None else self._settings()
        switch = OwnState(self._device, self._wear, settings)
        attending = self._room.attending(self._job, switch=switch, is_alone=self._is_alone)
        self._attending.enter_context(attending)
        return True

    def give_back(self) -> None:
        self._attending.close()

    def lend(self) -> None:
        # The room does, between passes.
        return

    def give_up(self) -> None:
        self._room.hurry(self._job)


class OwnState:
    """All generators of the process, as one job has left them, and its adapters (`Switch`).

    With `settings` also those of the modules, which are exchanged at borders only then, since
    looking for them in a large model takes milliseconds.
    """

    def __init__(
        self,
        device: torch.device,
        wear: Callable[[], None],
        settings: OwnSettings | None = None,
    ) -> None:
        self._device = device
        self._wear = wear
        self._settings = settings
        self._state = Randomness.now(device)

    def suspend(self) -> None:
        self._state = Randomness.now(self._device)
        if self._settings is not None:
            self._settings.put_away()

    def resume(self) -> None:
        self._state.restore(self._device)
        self._wear()
        if self._settings is not None:
            self._settings.put_back()


class Sweeps:
    """Gives rooms the baton. A room's thread lives for as long as somebody is in the room."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._mutex = threading.Lock()
        self._conducted: set[SweepRoom] = set()

    def expect(self, room: SweepRoom) -> None:
        """See to it that the room has the baton soon, for whoever is about to come or is there."""
        room.on_arrival = lambda: self._conduct(room)

    def _conduct(self, room: SweepRoom) -> None:
        with self._mutex:
            if room in self._conducted:
                return
            self._conducted.add(room)
        threading.Thread(target=self._run, args=(room,), name="sweep", daemon=True).start()

    def _run(self, room: SweepRoom) -> None:
        while True:
            self._baton.take_turn(Waiting())
            try:
                while room.run(until=lambda: self._baton.short_work_waits):
                    self._baton.lend()
            finally:
                self._baton.give_back()
            with self._mutex:
                # Whoever comes after this look finds no thread and starts one.
                if not room.members:
                    self._conducted.discard(room)
                    return
