"""Finds weights that are read while nothing has acquired their group, and who reads them.

Some modules read a child's weight instead of calling the child (`nn.MultiheadAttention` and its
`out_proj`), and helpers read parameters outside any forward; no hook fires there. In the first pass
every torch function that Python code calls is watched: an argument that is an absent weight is
exchanged for the real one, and the read is recorded with the module that was running.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StrayRead:
    """The tensor at `place` (module path, attribute) was read while `reader` was running.

    `reader` is the innermost module whose forward was under way; None outside every forward.
    """

    place: tuple[str, str]
    reader: str | None
