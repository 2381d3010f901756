"""Who may do what: over ipc the daemon's own user, root and a named group administrate; over tcp,
the holders of the keys that the allow-list says."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass

from offload_protocol.errors import InvalidRequest, Unauthorized
from offloadd.control.clients.allow_list import AllowList
from offloadd.control.clients.peers import LocalPeer, Peer


@dataclass(frozen=True, slots=True)
class Roles:
    """The administrators' uids, and the group whose processes count as such (None: no group).

    `keys` is the allow-list, None where the daemon is not reached over tcp.
    """

    uids: frozenset[int]
    group_id: int | None = None
    keys: AllowList | None = None

    def administrates(self, peer: Peer) -> bool:
        """Whether the peer may do what concerns others."""
        if isinstance(peer, LocalPeer):
            is_member = self.group_id is not None and peer.gid == self.group_id
            return peer.uid in self.uids or is_member
        found = self.keys.find(peer.key) if self.keys is not None else None
        return found is not None and found.role == "administrate"

    def is_banned(self, peer: Peer) -> bool:
        """Whether the peer's key was removed from the allow-list since it connected."""
        if isinstance(peer, LocalPeer):
            return False
        return self.keys is None or self.keys.find(peer.key) is None

    def require(self, peer: Peer, what: str) -> None:
        """Raise `Unauthorized` unless the peer administrates; `what` is the thing it wanted."""
        if not self.administrates(peer):
            way = (
                "ask as root or as the daemon's own user, or set daemon.admin_group"
                if isinstance(peer, LocalPeer)
                else "its file in the daemon's directory of keys would have to be in administrate/"
            )
            raise Unauthorized(
                f"{what} is for administrators of the daemon, and {peer.name} is none", hint=way
            )

    def require_allowed(self, peer: Peer) -> None:
        """Raise `Unauthorized` for a peer whose key was removed since it connected."""
        if self.is_banned(peer):
            raise Unauthorized(
                f"{peer.name} is no longer allowed here",
                hint="ask whoever runs the daemon to allow it again",
            )


def roles(admin_group: str, keys: AllowList | None = None) -> Roles:
    """The roles as they stand now; the group's members are looked up once.

    Raises `InvalidRequest` where the group does not exist.
    """
    uids = {0, os.getuid()}
    if not admin_group:
        return Roles(frozenset(uids), keys=keys)
    group = group_entry(admin_group, "daemon.admin_group")
    for name in group.gr_mem:
        try:
            uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    return Roles(frozenset(uids), group.gr_gid, keys)


def group_entry(name: str, key: str) -> grp.struct_group:
    """A group by name; raises `InvalidRequest` that names the configuration's key."""
    try:
        return grp.getgrnam(name)
    except KeyError:
        raise InvalidRequest(f"{key} is {name!r}, and there is no such group here") from None
