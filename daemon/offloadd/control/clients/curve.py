"""CURVE on a listening socket: encrypted by the daemon's key, for the holders of allowed keys only.

libzmq asks a handler in this process (ZAP, RFC 27) once per connection, before a byte of the
client's is delivered. Who is not on the allow-list is refused there, with a status that the
client's own socket reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from offload_protocol.keys import KeyPair
from offloadd.control.clients.allow_list import AllowList
from offloadd.control.clients.peers import RemotePeer

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"offloadd"
_VERSION = b"1.0"
_CURVE = b"CURVE"

_log = logging.getLogger(__name__)


class Curve:
    """The daemon's key and the keys that may connect; for one context and one socket."""

    def __init__(self, pair: KeyPair, allowed: AllowList) -> None:
        self._pair = pair
        self._allowed = allowed
        self.refused_total = 0

    def secure(self, router: zmq.Socket[bytes]) -> Callable[[], None]:
        """Let the socket take nobody but the allowed; to be called before it is bound.

        Gives the function that stops asking.
        """
        handler = router.context.socket(zmq.REP)
        handler.setsockopt(zmq.LINGER, 0)
        handler.bind(_ENDPOINT)
        loop = asyncio.get_running_loop()
        loop.add_reader(handler.get(zmq.FD), self._answer_all, handler)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

        def close() -> None:
            loop.remove_reader(handler.get(zmq.FD))
            handler.close()

        return close

    def peer(self, frame: zmq.Frame) -> RemotePeer | None:
        """The holder of the key that a frame came with, or None where it has been removed since."""
        try:
            key = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None
        found = self._allowed.find(key)
        return RemotePeer(key, f"key {found.name}") if found is not None else None

    def _answer_all(self, handler: zmq.Socket[bytes]) -> None:
        # The descriptor is edge-triggered: what is there has to be taken now.
        while handler.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            _, request, _, address, _, mechanism, *credentials = handler.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == _CURVE else ""
            # Now, and not as of a second ago: whoever has just been added tries at once.
            self._allowed.read()
            status, text = b"200", b"OK"
            if self._allowed.find(key) is None:
                status, text = b"400", b"unknown key"
                self.refused_total += 1
                _log.warning("refused %s: no key %s is allowed", address.decode(), key)
            handler.send_multipart((_VERSION, request, status, text, key.encode(), b""))
