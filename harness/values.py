"""Shows one value of a capture as text, floats with their bits, for messages and reports.

It does not know comparisons. Rules: a float is shown as its shortest exact decimal and its 32 bits, so that values that
print alike are still told apart.
"""

from __future__ import annotations

import numpy as np

from harness.compare.fields import FieldName
from harness.judged import Judged
from harness.traces import NO_TOKEN, Float32, Traces


def show_value(traces: Traces, judged: Judged, j: int, position: int, field: FieldName) -> str:
    """The value of a field at a position of judged request j; a position past its end shows as such."""
    table = traces.positions
    length = int(judged.lengths[j])
    if field == "length":
        return f"{length} tokens"
    if field == "finish_reason":
        return repr(traces.requests.finish_reason[int(judged.rows[j])])
    if position >= length:
        return f"nothing (ended after {length} tokens)"
    row = int(judged.starts[j]) + position
    if field in ("token", "pick"):
        return str(int((table.token if field == "token" else table.pick)[row]))
    if field == "logprob" and table.logprob is not None:
        return show_floats(table.logprob[row : row + 1])
    if field == "topk_ids" and table.topk_ids is not None:
        return str([int(token) for token in table.topk_ids[row] if token != NO_TOKEN])
    if field == "topk_logprobs" and table.topk_logprobs is not None:
        return show_floats(table.topk_logprobs[row])
    if field == "tensors" and table.logits_digest is not None:
        return "".join(f"{int(word):016x}" for word in table.logits_digest[row])
    return "nothing"


def show_floats(values: Float32) -> str:
    """Decimals and bits: `-0.5 (0xbf000000)`, comma separated."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ", ".join(f"{value!s} (0x{raw:08x})" for value, raw in zip(values, bits.tolist(), strict=True))
