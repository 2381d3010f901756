"""Digests of what an encoder's answer follows from: two differ wherever the answers could.

A value is fed with its type and its length before it, so that no two values look alike. Whatever
is not plain (a cache of keys and values, a tensor of another class, an array) has no digest.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from typing import Any

import torch

_OF_THIS_PROCESS = secrets.token_bytes(32)
"""Digests say nothing to whoever sees them, and are of no use in another process."""


class NoDigest(Exception):
    """A value is of a kind that is not compared."""


def digest(*values: Any) -> bytes:
    """32 bytes for these values; raises `NoDigest`.

    Tensors count with dtype, device, shape, strides and bytes; floats with their bits.
    """
    hasher = hashlib.blake2b(key=_OF_THIS_PROCESS, digest_size=32)
    _feed(hasher, values)
    return hasher.digest()


def _feed(hasher: Any, value: Any) -> None:
    kind = type(value)
    if value is None:
        hasher.update(b"N")
    elif kind is bool:
        hasher.update(b"T" if value else b"F")
    elif kind is int:
        _feed_bytes(hasher, b"i", hex(value).encode())
    elif kind is float:
        hasher.update(b"f" + struct.pack("<d", value))
    elif kind is str:
        _feed_bytes(hasher, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _feed_bytes(hasher, b"b", value)
    elif kind in _NAMED:
        _feed_bytes(hasher, _NAMED[kind], str(value).encode())
    elif kind in _SEQUENCES:
        hasher.update(_SEQUENCES[kind] + struct.pack("<Q", len(value)))
        for item in value:
            _feed(hasher, item)
    elif kind is dict:
        _feed_map(hasher, value)
    elif kind is torch.Tensor:
        _feed_tensor(hasher, value)
    else:
        raise NoDigest(kind.__name__)


_NAMED: dict[Any, bytes] = {torch.dtype: b"y", torch.device: b"v"}
_SEQUENCES: dict[Any, bytes] = {tuple: b"t", list: b"l", torch.Size: b"z"}


def _feed_bytes(hasher: Any, tag: bytes, data: bytes) -> None:
    hasher.update(tag + struct.pack("<Q", len(data)))
    hasher.update(data)


def _feed_map(hasher: Any, value: dict[Any, Any]) -> None:
    if any(type(key) is not str for key in value):
        raise NoDigest("a map whose keys are not words")
    hasher.update(b"d" + struct.pack("<Q", len(value)))
    for key in sorted(value):
        _feed(hasher, key)
        _feed(hasher, value[key])


def _feed_tensor(hasher: Any, value: torch.Tensor) -> None:
    is_plain = (
        value.layout is torch.strided
        and not value.is_meta
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.requires_grad
    )
    if not is_plain:
        raise NoDigest("a tensor that is not plain")
    hasher.update(b"x")
    _feed(hasher, (value.dtype, value.device, tuple(value.shape), value.stride()))
    # On a device this waits for what it has computed so far, which at an encoder's entry is little.
    data = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    hasher.update(data.numpy())
