"""Who is at the other end of a connection, and by what name what they own is theirs."""

from __future__ import annotations

from dataclasses import dataclass

import zmq


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A process of this machine, as the kernel knows it."""

    uid: int
    gid: int
    pid: int

    @property
    def user(self) -> str:
        """Who owns what this peer submits; no two users have the same."""
        return str(self.uid)

    @property
    def name(self) -> str:
        """The peer as people call it."""
        return f"uid {self.uid}"


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """The holder of a CURVE key; whatever session or program it claims, the key is who it is."""

    key: str
    name: str

    @property
    def user(self) -> str:
        """Who owns what this peer submits; a uid is a number, so none equals it."""
        return f"key:{self.key}"


Peer = LocalPeer | RemotePeer


def local_peer(frame: zmq.Frame) -> LocalPeer | None:
    """The process that sent a frame over ipc, or None where the transport does not tell."""
    try:
        _, uid, gid, pid = str(frame.get("Peer-Address")).split(":")
        return LocalPeer(int(uid), int(gid), int(pid))
    except (zmq.ZMQError, ValueError):
        return None
