"""Who is owed the device: time used by each user, and by each program of a user.

Pure start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, SIGCOMM 1996) on two levels: whoever
used least goes first, and whoever comes back after a pause starts at the time that the present
users have reached, so that nobody saves up idle hours and nobody pays for having been alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEAST_TURN_S = 0.001
"""What a turn costs at least, so that jobs that take no time are fairly shared too."""

MAX_REMEMBERED = 4096
"""Users, and programs of one user, whose past use is remembered while they have no jobs."""


@dataclass(slots=True)
class Level:
    """Parties that share with each other; `reached_s` is what the one served last had used."""

    used_s: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)
    reached_s: float = 0.0
    away: dict[str, None] = field(default_factory=dict)
    """Those in `used_s` that have no jobs."""

    def enter(self, party: str) -> None:
        """The party has a job more."""
        if party not in self.jobs:
            self.away.pop(party, None)
            self.used_s[party] = max(self.used_s.pop(party, 0.0), self.reached_s)
        self.jobs[party] = self.jobs.get(party, 0) + 1

    def leave(self, party: str) -> None:
        """The party has a job less."""
        self.jobs[party] -= 1
        if self.jobs[party]:
            return
        del self.jobs[party]
        self.away[party] = None
        if not self.jobs:
            # Nobody is left who could have been kept waiting: all begin anew from here.
            self.reached_s = max(self.used_s.values())
        for one in tuple(self.away):
            if self.used_s[one] <= self.reached_s or len(self.used_s) > MAX_REMEMBERED:
                del self.used_s[one], self.away[one]

    def serve(self, party: str) -> None:
        """The party gets the device."""
        self.reached_s = max(self.reached_s, self.used_s.get(party, 0.0))

    def charge(self, party: str, used_s: float) -> None:
        """The party has used the device, for the least turn at least."""
        used_s = max(used_s, LEAST_TURN_S)
        self.used_s[party] = self.used_s.get(party, self.reached_s) + used_s

    def copy(self) -> Level:
        """The same, to try things out on."""
        return Level(dict(self.used_s), dict(self.jobs), self.reached_s, dict(self.away))


class Shares:
    """Device time by user, and by program within a user; each job enters once and leaves once."""

    def __init__(self) -> None:
        self._users = Level()
        self._programs: dict[str, Level] = {}

    def enter(self, user: str, program: str) -> None:
        """A job of theirs waits."""
        self._users.enter(user)
        self._programs.setdefault(user, Level()).enter(program)

    def leave(self, user: str, program: str) -> None:
        """A job of theirs neither waits nor runs any more."""
        self._programs[user].leave(program)
        self._users.leave(user)
        if len(self._programs) > len(self._users.used_s):
            for one in [one for one in self._programs if one not in self._users.used_s]:
                del self._programs[one]

    def serve(self, user: str, program: str) -> None:
        """A job of theirs starts."""
        self._users.serve(user)
        self._programs[user].serve(program)

    def charge(self, user: str, program: str, used_s: float) -> None:
        """A job of theirs has had the device for this time."""
        self._users.charge(user, used_s)
        self._programs[user].charge(program, used_s)

    def user_s(self, user: str) -> float:
        """What a user has used who has jobs; the least goes first."""
        return self._users.used_s[user]

    def program_s(self, user: str, program: str) -> float:
        """What a program of a user has used, as far as its user's programs are concerned."""
        return self._programs[user].used_s[program]

    def copy(self) -> Shares:
        """The same, to try things out on."""
        copy = Shares()
        copy._users = self._users.copy()
        copy._programs = {user: level.copy() for user, level in self._programs.items()}
        return copy
