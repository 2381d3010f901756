"""How much of the device the weights of some components may take together, whatever else is free.

The executor keeps to it: idle components give way to the one that runs among those that share an
allowance, and what does not fit passes through the ring.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Allowance:
    """`limit_bytes` is for what stays and, while one of them runs, for the ring.

    `kept_bytes` is what all of them keep there for good, whatever the plan; the engine writes it.
    """

    limit_bytes: int
    kept_bytes: int = 0
