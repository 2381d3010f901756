"""What tells one state of a file from another, without reading its bytes.

Recorded when a header is read and compared around every later read: as long as nothing here has
changed, the bytes are those that were indexed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One state of one file; `links`, `mode`, `owner` only explain why `ctime_ns` may move."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    links: int
    mode: int
    owner: tuple[int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            links=status.st_nlink,
            mode=status.st_mode,
            owner=(status.st_uid, status.st_gid),
        )

    def same_file(self, other: FileIdentity) -> bool:
        """The same inode, whatever was done to it."""
        return (self.device, self.inode) == (other.device, other.inode)

    def same_content_clock(self, other: FileIdentity) -> bool:
        """Same inode, length and modification time; the change time may still differ."""
        return self.same_file(other) and (self.size_bytes, self.mtime_ns) == (
            other.size_bytes,
            other.mtime_ns,
        )

    def same_state(self, other: FileIdentity) -> bool:
        """Nothing was written and nothing about the file was changed since."""
        return self.same_content_clock(other) and self.ctime_ns == other.ctime_ns

    def relabelled(self, other: FileIdentity) -> bool:
        """Links, mode or owner differ: reasons for a new change time that leave bytes alone."""
        return (self.links, self.mode, self.owner) != (other.links, other.mode, other.owner)
