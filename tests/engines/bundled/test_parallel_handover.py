"""Keys and values handed from one engine to another: the same bits, only of the same origin, and nothing in silence."""

import dataclasses
import json

import pytest
from engine_cases import evidence, greedy, options, request, run_all, scripted_engine

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.engine import Engine
from engines.bundled.errors import CacheStoreError, NotSupported
from engines.bundled.kernels.library import load
from engines.bundled.models.catalogue import open_source

MODEL = open_source("tiny").model()
PROMPTS = [list(range(40, 40 + count)) for count in (1, 2, 16, 17, 33)]
REQUESTS = [request(f"r{i}", prompt, greedy(max_tokens=6), logits_digest=True) for i, prompt in enumerate(PROMPTS)]


def open_engine(disaggregated, model=MODEL, digest=MODEL.digest, **changes):
    config = options(num_pages=64, max_num_batched_tokens=24, disaggregated=disaggregated, **changes)
    arithmetic = open_arithmetic(model, config)
    return Engine(model.config, config, arithmetic, load("auto", "auto"), str, model_digest=digest)


def prefill(folder, requests=REQUESTS, **changes):
    engine = open_engine("prefill", **changes)
    run_all(engine, [dataclasses.replace(one, sampling=greedy(max_tokens=1)) for one in requests])
    engine.outbox.save(folder)
    return folder


@pytest.fixture(scope="module")
def handover(tmp_path_factory):
    return prefill(tmp_path_factory.mktemp("handover") / "store")


def decode(folder, **changes):
    engine = open_engine("on", **changes)
    engine.scheduler.inbox.load(folder)
    return engine, run_all(engine, REQUESTS)


EXPECTED = [evidence(sequence) for sequence in run_all(open_engine("off"), REQUESTS)]


def test_what_is_decoded_elsewhere_is_the_same(handover):
    engine, found = decode(handover)
    assert [evidence(sequence) for sequence in found] == EXPECTED
    assert [sequence.cached_tokens for sequence in found] == [0, 1, 15, 16, 32]
    first = {ran.sequence.request.id: ran.start for ran in reversed(engine.log)}
    assert first == {"r0": 0, "r1": 1, "r2": 15, "r3": 16, "r4": 32}  # a prompt's last token alone is computed


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_pages_may_be_of_another_size_at_the_other_end(handover, page_size):
    _, found = decode(handover, page_size=page_size)
    assert [evidence(sequence) for sequence in found] == EXPECTED


def test_who_is_preempted_is_handed_the_same_again(handover):
    engine = open_engine("on", page_size=4)
    engine.scheduler.inbox.load(handover)
    engine.scheduler.pages.allocate(64 - 14)
    found = run_all_holding(engine)
    assert engine.scheduler.preemptions > 0
    assert sum(sequence.restored_tokens for sequence in found) > 0
    assert [evidence(sequence) for sequence in found] == EXPECTED


def run_all_holding(engine):
    sequences = [engine.submit(one) for one in REQUESTS]
    while engine.has_work:
        engine.step()
    return sequences


def test_a_handover_with_tokens_in_wrong_places_shows(handover):
    _, found = decode(handover, fault="misplaced-page")
    different = [evidence(sequence) != expected for sequence, expected in zip(found, EXPECTED, strict=True)]
    assert different[2:] == [True] * 3


def test_other_prompts_are_computed_as_ever(handover):
    engine = open_engine("on")
    engine.scheduler.inbox.load(handover)
    other = request("other", [9, *PROMPTS[4][1:]], greedy(max_tokens=3))
    (found,) = run_all(engine, [other])
    assert found.cached_tokens == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "another"}, "model: expected 'another', found '[0-9a-f]{64}'"),
        ({"arithmetic": "free"}, "arithmetic: expected 'free', found 'portable'; definition: expected 0, found 1"),
        ({"tuning": 3}, "tuning: expected 3, found 0"),
    ],
)
def test_a_handover_of_another_origin_is_refused_by_name(handover, changes, message):
    engine = open_engine("on", **changes)
    with pytest.raises(CacheStoreError, match=f"is of another origin and is not used: {message}"):
        engine.scheduler.inbox.load(handover)


def test_another_definition_and_another_shape_are_refused_by_name(handover, tmp_path):
    def changed(**parts):
        header = json.loads((handover / "store.json").read_text())
        for name, values in parts.items():
            header[name] |= values
        return header

    for parts, message in [
        ({"origin": {"definition": 2}}, "definition: expected 1, found 2"),
        ({"page": {"layers": 3}}, "layers: expected 2, found 3"),
    ]:
        spoil(handover, tmp_path / "bad", changed(**parts))
        with pytest.raises(CacheStoreError, match=message):
            open_engine("on").scheduler.inbox.load(tmp_path / "bad")


def spoil(source, target, header, content=None):
    target.mkdir(exist_ok=True)
    (target / "store.json").write_text(json.dumps(header))
    (target / "pages.f32").write_bytes((source / "pages.f32").read_bytes() if content is None else content)


def test_damage_is_found_before_a_page_is_touched(handover, tmp_path):
    header = json.loads((handover / "store.json").read_text())
    content = bytearray((handover / "pages.f32").read_bytes())
    content[-1] ^= 1
    cases = [
        (header, bytes(content), "pages.f32 is damaged: SHA-256"),
        (header, bytes(content[:-4]), "pages.f32 is damaged: SHA-256"),
        ({**header, "schema": 9}, None, "schema: expected 1, found 9"),
        ({**header, "prompts": header["prompts"][1:]}, None, "expected [0-9]+ floats, found"),
        ({**header, "prompts": [{"key": "zz"}]}, None, "its list of prompts is damaged"),
    ]
    for spoiled, data, message in cases:
        spoil(handover, tmp_path / "bad", spoiled, data)
        engine = open_engine("on")
        with pytest.raises(CacheStoreError, match=message):
            engine.scheduler.inbox.load(tmp_path / "bad")
        assert [evidence(sequence) for sequence in run_all(engine, REQUESTS)] == EXPECTED


def test_saving_forgets_and_what_is_not_here_is_said(tmp_path):
    prefill(tmp_path / "one", REQUESTS[:3])
    engine = open_engine("prefill")
    assert engine.outbox.save(tmp_path / "none") == 0
    inbox = open_engine("on").scheduler.inbox
    assert inbox.load(tmp_path / "one") == 2  # a prompt of one token has nothing to hand over
    assert inbox.load(tmp_path / "none") == 0
    with pytest.raises(CacheStoreError, match="cannot be read: No such file"):
        inbox.load(tmp_path / "nothing")


def test_pages_outside_this_process_are_refused():
    for role in ("prefill", "on"):
        with pytest.raises(NotSupported, match="keeps its pages outside this process's memory"):
            scripted_engine(options(disaggregated=role))
