"""What a file that should be safetensors really is, said in a sentence of its own.

Pure: the first bytes of a file in, a verdict out. The usual ways in which a download goes wrong
each have a shape that can be told apart: an unfetched git-lfs pointer, an error page, nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_BYTES = 512
_LFS = re.compile(rb"\Aversion https://git-lfs\.github\.com/spec/v\d[^\n]*\n")
_LFS_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)
_PICKLE = re.compile(rb"\A\x80[\x02-\x05]")


@dataclass(frozen=True, slots=True)
class Imposter:
    """`problem` completes the sentence "FILE ..."; `expected_bytes` is the real size if known."""

    kind: str
    problem: str
    hint: str
    expected_bytes: int | None = None


def recognise(head: bytes, file_bytes: int) -> Imposter | None:
    """Tell from a file's first bytes (up to 512) whether it is a well-known something else."""
    if file_bytes == 0:
        return Imposter("empty", "is empty: it has 0 bytes", "download it again")
    if _LFS.match(head):
        return _lfs_pointer(head, file_bytes)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return Imposter(
            "html",
            "is a web page, not weights: what was saved is the answer of a web server",
            "download it again with a tool that logs in where the model asks for it",
        )
    if _PICKLE.match(head):
        return Imposter(
            "pickle",
            "is a Python pickle under a safetensors name, and pickles are not accepted",
            "convert it to safetensors with save_pretrained(..., safe_serialization=True)",
        )
    if head.startswith(b"PK\x03\x04"):
        return Imposter(
            "archive",
            "is a zip archive (torch.save writes these around a pickle), and pickles are not "
            "accepted",
            "convert it to safetensors with save_pretrained(..., safe_serialization=True)",
        )
    return None


def _lfs_pointer(head: bytes, file_bytes: int) -> Imposter:
    size = _LFS_SIZE.search(head)
    expected = int(size.group(1)) if size else None
    real = f" of {expected} bytes" if expected is not None else ""
    return Imposter(
        "lfs_pointer",
        f"is a git-lfs pointer of {file_bytes} bytes, not the weights{real} that it stands for",
        "run `git lfs pull` in the model's directory, or download the model again",
        expected,
    )
