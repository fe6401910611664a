"""Judged digests: SHA-256 over what a capture is judged by, request by request.

It does not know files, times or engines. Rules: companions, step tables, counters and timings stay out; the order of
submission and the file format do not matter; widths are explicit and little-endian; floats enter as their bits.

Bytes of one request, in this order (u = unsigned, i = signed, number = bits, all little-endian):

    "samebits judged 1\\n"                                   magic with the layout's number
    u32 length, UTF-8 bytes                                 request id
    i32                                                     sample index
    u32 length, UTF-8 bytes                                 finish reason
    u64                                                     L, generated positions
    five columns, each: u8 tag, u32 W, then L x W values    W is 0 for a column the capture lacks
        1 token          i32    W = 1
        2 pick           i32    W = 1
        3 logprob        u32    W = 1   float32 bits
        4 top-k          (i32 id, u32 float32 bits) pairs, position by position
        5 logits digest  u64    W = 2

Trailing top-k columns that hold nothing but padding for the whole request (id -1, bits 0x7FC00000) are left out of W,
so that a capture made wider by a companion's longer list has the same digest. The judged digest of a capture is the
SHA-256 of "samebits judged capture 1\\n", u32 number of requests, and the requests' 32-byte digests, ordered by
(id as UTF-8 bytes, sample).
"""

from __future__ import annotations

import hashlib

import numpy as np

from harness.judged import Judged, RequestKey, find_judged
from harness.traces import NO_TOKEN, Bool, Float32, Int32, PositionTable, Traces

PADDING_BITS = 0x7FC00000  # the float32 quiet NaN that pads top-k rows
_REQUEST_MAGIC = b"samebits judged 1\n"
_CAPTURE_MAGIC = b"samebits judged capture 1\n"


def request_digests(traces: Traces) -> tuple[str, ...]:
    """Hexadecimal digest of every judged request, ordered by (id, sample). Raises ComparisonError."""
    return tuple(digest.hex() for _, digest in _digests(traces))


def judged_keys(traces: Traces) -> tuple[RequestKey, ...]:
    """The keys that `request_digests` follows."""
    return tuple(key for key, _ in _digests(traces))


def judged_digest(traces: Traces) -> str:
    """Hexadecimal digest of everything judged in a capture. Raises ComparisonError."""
    digests = [digest for _, digest in _digests(traces)]
    return hashlib.sha256(_CAPTURE_MAGIC + _u32(len(digests)) + b"".join(digests)).hexdigest()


def digests_of(traces: Traces, found: Judged) -> tuple[str, ...]:
    """Hexadecimal digest of each judged request in the order of `found`, whose keys may be renamed ones."""
    return tuple(_request_digest(traces, found, j).hex() for j in range(len(found.keys)))


def is_padding(ids: Int32, values: Float32) -> Bool:
    """Cells (any shape) that are top-k padding, to the bit."""
    padded: Bool = (ids == NO_TOKEN) & (values.view(np.uint32) == PADDING_BITS)
    return padded


def _digests(traces: Traces) -> list[tuple[RequestKey, bytes]]:
    found = find_judged(traces)
    order = sorted(range(len(found.keys)), key=lambda j: (found.keys[j].id.encode(), found.keys[j].sample))
    return [(found.keys[j], _request_digest(traces, found, j)) for j in order]


def _request_digest(traces: Traces, found: Judged, j: int) -> bytes:
    key, length = found.keys[j], int(found.lengths[j])
    part = slice(int(found.starts[j]), int(found.starts[j]) + length)
    sha = hashlib.sha256(_REQUEST_MAGIC)
    sha.update(_text(key.id) + _i32(key.sample))
    sha.update(_text(traces.requests.finish_reason[int(found.rows[j])]))
    sha.update(length.to_bytes(8, "little"))
    for tag, (width, data) in enumerate(_columns(traces.positions, part), start=1):
        sha.update(bytes([tag]) + _u32(width))
        sha.update(data)
    return sha.digest()


def _columns(table: PositionTable, part: slice) -> list[tuple[int, bytes]]:
    logprob, digest = table.logprob, table.logits_digest
    return [
        (1, _bytes(table.token[part], "<i4")),
        (1, _bytes(table.pick[part], "<i4")),
        (0, b"") if logprob is None else (1, _bytes(logprob[part].view(np.uint32), "<u4")),
        _topk(table.topk_ids, table.topk_logprobs, part),
        (0, b"") if digest is None else (2, _bytes(digest[part], "<u8")),
    ]


def _topk(ids: Int32 | None, values: Float32 | None, part: slice) -> tuple[int, bytes]:
    if ids is None or values is None:
        return 0, b""
    ids, values = np.ascontiguousarray(ids[part]), np.ascontiguousarray(values[part])
    used = np.flatnonzero(~is_padding(ids, values).all(axis=0))
    width = int(used[-1]) + 1 if used.size else 0
    pairs = np.empty((ids.shape[0], width, 2), dtype="<u4")
    pairs[..., 0] = ids[:, :width].view(np.uint32)
    pairs[..., 1] = values.view(np.uint32)[:, :width]
    return width, pairs.tobytes()


def _bytes(column: np.ndarray[tuple[int, ...], np.dtype[np.generic]], dtype: str) -> bytes:
    return column.astype(dtype, copy=False).tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return _u32(len(data)) + data


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _i32(number: int) -> bytes:
    return number.to_bytes(4, "little", signed=True)
