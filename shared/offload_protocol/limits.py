"""Bounds on what a peer may send; the daemon announces them in its hello and enforces them."""

from __future__ import annotations

import msgspec

from offload_protocol.errors import InvalidRequest

MAX_SEED = (1 << 63) - 1
"""What the journal and torch both hold."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one message may hold. Clients check before they send, the daemon checks again."""

    max_body_bytes: int = 1 << 20
    """The msgpack body of one message."""
    max_frames: int = 256
    """Array and image frames beside the body."""
    max_frame_bytes: int = 512 << 20
    """One frame; a longer one makes the transport drop the connection."""
    max_message_bytes: int = 1 << 30
    """All frames of one message."""
    max_depth: int = 16
    """Nesting of lists and maps in arguments."""
    max_text_chars: int = 65_536
    """One string, prompts included."""
    max_piece_bytes: int = 1 << 20
    """What `read` gives at once; a result with more in its frames comes in pieces."""


DEFAULT_LIMITS = Limits()


def check_seed(seed: int | None) -> None:
    """Raise `InvalidRequest` for a seed that no job can have; None lets the daemon draw one."""
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise InvalidRequest(f"the seed is {seed}", hint=f"it takes 0 to {MAX_SEED}")
