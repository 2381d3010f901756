"""The bases of all messages on the channel, by direction."""

from __future__ import annotations

import msgspec


class ToWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of what the control plane says."""


class FromWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of what a worker says."""
