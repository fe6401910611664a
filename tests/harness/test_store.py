"""The store: what goes in comes out bit for bit, and a changed byte anywhere is found."""

import dataclasses
import json

import numpy as np
import pytest

from harness.capture import Capture
from harness.digest import is_padding, judged_digest
from harness.engine import Field
from harness.errors import OutputError, StoreError
from harness.store import Store
from harness.traces import NO_TOKEN, PositionTable, RequestTable, StepTable, Traces

INT, FLOAT = np.int32, np.float32
ODD_BITS = np.array([0x80000000, 0x7FC00001, 0x00000001, 0xFF800000, 0x3F800000], np.uint32).view(FLOAT)


def capture(case="00ff"):
    requests = RequestTable(
        id=("a", "b"), sample=np.zeros(2, INT), companion=np.array([False, True]), prompt_tokens=np.array([3, 4], INT),
        length=np.array([2, 3], np.int64), finish_reason=("length", "stop"), cached_tokens=np.zeros(2, INT),
        preemptions=np.zeros(2, INT), arrival_s=np.zeros(2), first_token_s=np.ones(2), finish_s=np.full(2, 2.0),
    )  # fmt: skip
    positions = PositionTable(
        token=np.arange(5, dtype=INT), pick=np.arange(5, dtype=INT), logprob=ODD_BITS,
        topk_ids=np.arange(10, dtype=INT).reshape(5, 2), topk_logprobs=np.stack([ODD_BITS, ODD_BITS[::-1]], axis=1),
        logits_digest=np.arange(10, dtype=np.uint64).reshape(5, 2) + np.uint64(2**63),
    )  # fmt: skip
    rows = np.array([0, 0, 1], INT)
    steps = StepTable(step=rows, request=rows, start=rows, count=rows + INT(1))
    return Capture(
        case=case, traces=Traces(requests=requests, positions=positions, steps=steps, counters=(("steps", 2),)),
        requested={"threads": 2}, resolved={"isa": "x"}, observed={"threads": 2},
        subject=(Field(name="a", value=None, field_class="identity", source="unknown, because"),),
        process_nonce="p", repetition_nonce="r", session="s", judged_digest="d", seconds=0.5,
    )  # fmt: skip


def columns(table):
    return {name: getattr(table, name) for name in table.__slots__}


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def test_what_goes_in_comes_out_bit_for_bit(tmp_path):
    store, made = Store(tmp_path), capture()
    store.write(made)
    back = store.read("00ff")
    for name in ("requests", "positions", "steps"):
        left, right = columns(getattr(made.traces, name)), columns(getattr(back.traces, name))
        for column in left:
            assert same(left[column], right[column]), column
    assert back.traces.counters == made.traces.counters
    assert back.subject == made.subject
    assert (back.process_nonce, back.repetition_nonce, back.session) == ("p", "r", "s")
    assert store.cases() == ("00ff",)


def test_missing_columns_stay_missing(tmp_path):
    made = capture()
    bare = PositionTable(
        token=made.traces.positions.token, pick=made.traces.positions.pick, logprob=None, topk_ids=None,
        topk_logprobs=None, logits_digest=None,
    )  # fmt: skip
    traces = Traces(requests=made.traces.requests, positions=bare, steps=None, counters=())
    Store(tmp_path).write(Capture(**{n: getattr(made, n) for n in made.__slots__ if n != "traces"}, traces=traces))
    back = Store(tmp_path).read("00ff").traces
    assert back.positions.logprob is None
    assert back.positions.topk_ids is None
    assert back.steps is None


@pytest.mark.parametrize("name", ["requests.parquet", "positions.parquet", "steps.parquet"])
def test_a_flipped_byte_is_found(tmp_path, name):
    Store(tmp_path).write(capture())
    file = tmp_path / "00ff" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(StoreError, match=f"{name}: expected SHA-256"):
        Store(tmp_path).read("00ff")


@pytest.mark.parametrize(("schema", "sentence"), [(None, "missing"), (0, "older than 1"), (2, "install a newer")])
def test_schema_numbers_have_three_sentences(tmp_path, schema, sentence):
    Store(tmp_path).write(capture())
    file = tmp_path / "00ff" / "capture.json"
    header = json.loads(file.read_text())
    header["schema"] = schema
    file.write_text(json.dumps(header))
    with pytest.raises(StoreError, match=sentence):
        Store(tmp_path).read("00ff")


def test_a_capture_in_which_nobody_asked_for_candidates_is_kept(tmp_path):
    made = capture()
    nothing = dataclasses.replace(
        made.traces.positions, topk_ids=np.empty((5, 0), INT), topk_logprobs=np.empty((5, 0), FLOAT)
    )
    traces = dataclasses.replace(made.traces, positions=nothing)
    Store(tmp_path).write(dataclasses.replace(made, traces=traces))
    found = Store(tmp_path).read(made.case).traces
    assert found.positions.topk_ids.tolist() == [[NO_TOKEN]] * 5
    assert is_padding(found.positions.topk_ids, found.positions.topk_logprobs).all()
    assert judged_digest(found) == judged_digest(traces)


def test_a_capture_that_is_not_there_is_an_error(tmp_path):
    assert not Store(tmp_path).has("00ff")
    with pytest.raises(StoreError, match="expected a capture's header"):
        Store(tmp_path).read("00ff")


def test_writing_twice_replaces_and_leaves_nothing_aside(tmp_path):
    store = Store(tmp_path)
    store.write(capture())
    store.write(capture())
    assert [entry.name for entry in tmp_path.iterdir()] == ["00ff"]


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    import pyarrow.parquet as pq

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OutputError, match="No space left on device"):
        Store(tmp_path / "x").write(capture())
    assert list((tmp_path / "x").iterdir()) == []
