"""The safetensors header, parsed and checked before a byte of tensor data is allocated.

Pure: bytes and sizes in, tensors out. Format: 8 bytes little-endian header length, then that many
bytes of JSON (`{name: {dtype, shape, data_offsets}}`, optional `__metadata__`), then the data,
which the tensors must cover without overlap and without holes. Stricter than the reference parser
in two points: duplicate keys are refused, and so are dtypes that the store cannot hold.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offloadd.store.index.strict_json import parse_object
from offloadd.store.layout import DTYPE_BITS, TensorSpec

LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000
DIMENSIONS_LIMIT = 64
ELEMENTS_LIMIT = 2**63 - 1
"""What a library can count, which a tensor without elements may exceed in its other dimensions."""


class BadHeader(ValueError):
    """A safetensors file that cannot be trusted.

    `tensor` names the tensor at fault (empty: the file as a whole), `expected` and `found` say
    what was compared; `truncated` tells that the file merely ends too early.
    """

    def __init__(
        self,
        problem: str,
        *,
        tensor: str = "",
        expected: object = None,
        found: object = None,
        truncated: bool = False,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.truncated = truncated


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor and the offset of its first byte from the start of the data."""

    spec: TensorSpec
    start_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: the tensors in file order, and where in the file the data begins."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]
    data_start_bytes: int
    data_bytes: int


def header_length(prefix: bytes, file_bytes: int) -> int:
    """The header's length from the file's first 8 bytes, known to lie inside the file.

    Raises `BadHeader` when the length is over 100 MB or over what the file holds.
    """
    if len(prefix) < LENGTH_BYTES:
        raise BadHeader(
            f"the file has {file_bytes} bytes, fewer than the 8 that every safetensors file has",
            expected=LENGTH_BYTES,
            found=file_bytes,
            truncated=True,
        )
    (length,) = struct.unpack("<Q", prefix[:LENGTH_BYTES])
    if length > HEADER_LIMIT_BYTES:
        raise BadHeader(
            f"its header claims {length} bytes; at most {HEADER_LIMIT_BYTES} are allowed",
            expected=HEADER_LIMIT_BYTES,
            found=length,
        )
    if length + LENGTH_BYTES > file_bytes:
        raise BadHeader(
            f"its header needs {length + LENGTH_BYTES} bytes but the file has {file_bytes}",
            expected=length + LENGTH_BYTES,
            found=file_bytes,
            truncated=True,
        )
    return int(length)


def parse_header(text: bytes, file_bytes: int) -> Header:
    """Check the header's JSON text against the size of the file that it stands in.

    Raises `BadHeader`; nothing larger than the parsed text itself is allocated.
    """
    if not text.startswith(b"{"):
        raise BadHeader("its header does not begin with {", expected="{", found=repr(text[:8]))
    try:
        entries = parse_object(text)
    except ValueError as error:
        raise BadHeader(f"its header cannot be read: {error}") from None
    metadata = _metadata(entries.pop("__metadata__", {}))
    tensors = sorted(
        (_tensor(name, entry) for name, entry in entries.items()),
        key=lambda found: (found.start_bytes, found.spec.size_bytes),
    )
    data_start = LENGTH_BYTES + len(text)
    data_bytes = _check_cover(tensors)
    if data_start + data_bytes != file_bytes:
        short = data_start + data_bytes > file_bytes
        raise BadHeader(
            f"its tensors need a file of {data_start + data_bytes} bytes but it has {file_bytes}",
            tensor=tensors[-1].spec.name if short and tensors else "",
            expected=data_start + data_bytes,
            found=file_bytes,
            truncated=short,
        )
    return Header(tuple(tensors), metadata, data_start, data_bytes)


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise BadHeader("its __metadata__ is not a map of strings", tensor="__metadata__")
    return value


def _tensor(name: str, entry: Any) -> HeaderTensor:
    if not isinstance(entry, dict):
        raise BadHeader(
            f"its entry is a {type(entry).__name__}, not an object", tensor=name, expected="object"
        )
    dtype = _dtype(name, entry.get("dtype"))
    shape = _whole_numbers(name, "shape", entry.get("shape"), limit=DIMENSIONS_LIMIT)
    offsets = _whole_numbers(name, "data_offsets", entry.get("data_offsets"), limit=2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadHeader(
            f"its data_offsets are {list(offsets)}, not a start and a stop",
            tensor=name,
            expected="[start, stop]",
            found=list(offsets),
        )
    if math.prod(max(size, 1) for size in shape) > ELEMENTS_LIMIT:
        raise BadHeader(
            f"its shape {list(shape)} is beyond what can be counted",
            tensor=name,
            expected=ELEMENTS_LIMIT,
            found=list(shape),
        )
    spec = TensorSpec(name, dtype, shape)
    if spec.size_bytes != offsets[1] - offsets[0]:
        raise BadHeader(
            f"{dtype} of shape {list(shape)} takes {spec.size_bytes} bytes but its data_offsets "
            f"span {offsets[1] - offsets[0]}",
            tensor=name,
            expected=spec.size_bytes,
            found=offsets[1] - offsets[0],
        )
    return HeaderTensor(spec, offsets[0])


def _dtype(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in DTYPE_BITS:
        raise BadHeader(
            f"its dtype is {value!r}, which the store does not hold (it holds "
            f"{', '.join(sorted(DTYPE_BITS))})",
            tensor=name,
            expected=sorted(DTYPE_BITS),
            found=value if isinstance(value, str) else repr(value),
        )
    return value


def _whole_numbers(name: str, key: str, value: Any, *, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 2**64 for number in value
    ):
        raise BadHeader(
            f"its {key} is not a list of whole numbers", tensor=name, expected="whole numbers"
        )
    if len(value) > limit:
        raise BadHeader(
            f"its {key} has {len(value)} entries; at most {limit} are allowed",
            tensor=name,
            expected=limit,
            found=len(value),
        )
    return tuple(value)


def _check_cover(tensors: list[HeaderTensor]) -> int:
    cursor = 0
    for tensor in tensors:
        if tensor.start_bytes != cursor:
            kind = "overlaps the one before it" if tensor.start_bytes < cursor else "leaves a hole"
            raise BadHeader(
                f"it {kind}: it starts at byte {tensor.start_bytes} of the data, not at {cursor}",
                tensor=tensor.spec.name,
                expected=cursor,
                found=tensor.start_bytes,
            )
        cursor += tensor.spec.size_bytes
    return cursor
