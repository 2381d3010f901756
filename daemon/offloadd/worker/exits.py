"""The worker's exit codes: why it ended, in a number that its supervisor can branch on."""

from __future__ import annotations

CHANNEL_CLOSED = 0
"""The control plane closed the channel, which is how a worker is told to end."""

NO_DEVICE = 20
"""The device that was asked for is not there or cannot be used; starting again will not help."""

DEVICE_FAULT = 21
"""The device or its driver failed in a way that poisons the process; a new process may do."""

BROKEN = 22
"""A thread of the worker ended by a fault of the worker itself."""
