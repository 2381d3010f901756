"""Who may administrate: the daemon's own user, root, and the members of a named group."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass

from offload_protocol.errors import InvalidRequest, Unauthorized
from offloadd.control.router import Peer


@dataclass(frozen=True, slots=True)
class Roles:
    """The administrators' uids, and the group whose processes count as such (None: no group)."""

    uids: frozenset[int]
    group_id: int | None = None

    def administrates(self, peer: Peer) -> bool:
        """Whether the process at the other end may do what concerns others."""
        return peer.uid in self.uids or (self.group_id is not None and peer.gid == self.group_id)

    def require(self, peer: Peer, what: str) -> None:
        """Raise `Unauthorized` unless the peer administrates; `what` is the thing it wanted."""
        if not self.administrates(peer):
            raise Unauthorized(
                f"{what} is for administrators of the daemon, and uid {peer.uid} is none",
                hint="ask as root or as the daemon's own user, or set daemon.admin_group",
            )


def roles(admin_group: str) -> Roles:
    """The roles as they stand now; the group's members are looked up once.

    Raises `InvalidRequest` where the group does not exist.
    """
    uids = {0, os.getuid()}
    if not admin_group:
        return Roles(frozenset(uids))
    group = group_entry(admin_group, "daemon.admin_group")
    for name in group.gr_mem:
        try:
            uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    return Roles(frozenset(uids), group.gr_gid)


def group_entry(name: str, key: str) -> grp.struct_group:
    """A group by name; raises `InvalidRequest` that names the configuration's key."""
    try:
        return grp.getgrnam(name)
    except KeyError:
        raise InvalidRequest(f"{key} is {name!r}, and there is no such group here") from None
