"""The vision encoder behind the harness's seam, and the corpus `images` it is judged on."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engines import bundled_vision
from engines.bundled_adapter import BundledAdapter
from harness.claims import check_claims
from harness.compare import compare
from harness.corpus import SHIPPED, load_corpus
from harness.corpus.freeze import Order, freeze
from harness.engine import Work
from harness.errors import EngineError, ModelError, Unsupported
from harness.expected import expected_of, missing_from
from harness.request import Grammar
from harness.schedules import build_schedule
from harness.witness import witnessed

sys.path.insert(0, str(Path(__file__).parent / "bundled" / "vision"))
import picture_making

ADAPTER = BundledAdapter()
CORPUS = load_corpus("images")
IDS = tuple(request.id for request in CORPUS.requests)


def started(**settings):
    return ADAPTER.start("tiny-vit", {"threads": 1, **settings})


def encode(engine, schedule="together", requests=CORPUS.requests, replay="natural"):
    ids = [request.id for request in requests]
    work = Work(
        requests=tuple(requests), schedule=build_schedule(schedule, ids), replay=replay, golden={}, logits_digests=True
    )
    return engine.generate(work, lambda done, tokens: None)


def differing(a, b):
    return compare(a, b, rule="tensors", replay="natural").differing_positions


def test_the_corpus_is_made_by_the_program_that_says_so(tmp_path):
    source = tmp_path / "source.jsonl"
    source.write_text("\n".join(picture_making.lines()) + "\n")
    assert source.read_bytes() == (SHIPPED / "images" / "source.jsonl").read_bytes()
    order = Order(
        source=source, tokenizer=ADAPTER.tokenizer("tiny-vit"), tokenizer_name="tiny-vit", name="images",
        description=picture_making.DESCRIPTION, defaults={}, arbitrary_ids=(), keep_source=True,
    )  # fmt: skip
    again = freeze(order, tmp_path / "images")
    assert again.corpus.digest == CORPUS.digest
    shipped = sorted(path for path in (SHIPPED / "images").rglob("*") if path.is_file())
    made = sorted(path for path in (tmp_path / "images").rglob("*") if path.is_file())
    assert [path.read_bytes() for path in made] == [path.read_bytes() for path in shipped]
    assert len(shipped) > 25


def test_company_order_and_repetition_change_nothing():
    engine = started()
    reference = encode(engine, "alone")
    assert check_claims(reference) == ()
    assert missing_from(reference, expected_of(CORPUS.requests, IDS)) == ()
    assert reference.positions.logits_digest.shape == (sum(r.sampling.max_tokens for r in CORPUS.requests), 2)
    for schedule in ("alone", "together", "reversed", "interleaved"):
        variant = encode(engine, schedule)
        assert check_claims(variant) == ()
        assert differing(reference, variant) == 0, schedule
    assert witnessed(reference, encode(engine, "together"), "beside").positions > 300


def test_the_control_fires():
    engine = started(arithmetic="free")
    assert differing(encode(engine, "alone"), encode(engine, "alone")) == 0
    assert differing(encode(engine, "alone"), encode(engine, "together")) > 100


def test_a_seat_less_and_a_smaller_step_change_steps_and_nothing_else():
    wide, narrow = encode(started()), encode(started(max_num_seqs=2, max_num_batched_tokens=60))
    assert dict(narrow.counters)["steps"] > dict(wide.counters)["steps"]
    assert dict(narrow.counters)["max_running"] <= 2
    assert differing(wide, narrow) == 0


def test_one_changed_pixel_is_seen(monkeypatch):
    reference = encode(started())
    honest = bundled_vision.read_png

    def spoilt(data, what):
        pixels = honest(data, what).copy()
        pixels[0, 0, 0] ^= 1
        return pixels

    monkeypatch.setattr(bundled_vision, "read_png", spoilt)
    assert differing(reference, encode(started())) > 300


REQUEST = CORPUS.requests[0]
REFUSED = [
    (replace(REQUEST, images=()), Unsupported, "'album-0': no image"),
    (replace(REQUEST, grammar=Grammar(kind="regex", text="a")), Unsupported, "a grammar or a temperature"),
    (replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=9)), EngineError,
     "max_tokens is 9, its images have 13 patches of 8 pixels"),
    (replace(REQUEST, images=(replace(REQUEST.images[0], media_type="image/webp"),)), Unsupported, "reads image/png"),
    (replace(REQUEST, images=(replace(REQUEST.images[0], sha256="0" * 64),)), ModelError, "no shipped corpus holds it"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "error", "message"), REFUSED)
def test_what_cannot_be_encoded_is_refused_by_name(request_, error, message):
    with pytest.raises(error, match=message):
        encode(started(), requests=[request_])


def test_a_forced_path_and_settings_of_language_models_are_refused():
    with pytest.raises(Unsupported, match="replay 'golden': an encoder generates nothing"):
        encode(started(), replay="golden")
    for settings in ({"draft": "lookup"}, {"page_size": 8}, {"prefix_cache": True}, {"device": "cuda"}):
        with pytest.raises(Unsupported, match="an image encoder has no such setting"):
            started(**settings)
    with pytest.raises(Unsupported, match="arithmetic=native: the encoder computes in portable, free"):
        started(arithmetic="native")


def test_damaged_bytes_are_noticed(tmp_path, monkeypatch):
    folder = tmp_path / "images" / "images"
    folder.mkdir(parents=True)
    (folder / REQUEST.images[0].sha256).write_bytes(b"something else")
    monkeypatch.setattr(bundled_vision, "CORPORA", tmp_path)
    with pytest.raises(ModelError, match="its bytes have another SHA-256"):
        encode(started(), requests=[REQUEST])


def test_the_tokenizer_reads_no_text():
    tokenizer = ADAPTER.tokenizer("tiny-vit")
    assert tokenizer.encode_chat([("user", "")]) == (0,)
    with pytest.raises(ModelError, match="an image encoder reads no text"):
        tokenizer.encode("hello")
    assert ADAPTER.model_facts("tiny-vit").vocab_size == tokenizer.vocab_size == 1
    engine = started()
    assert {"tokenizer.digest", "model.digest", "kernels.digest"} <= {field.name for field in engine.fingerprint()}
    assert engine.observed()["threads"] >= 1
    assert engine.resolved()["chunk_width"] == 256
    engine.stop()
    assert np.isfinite(encode(engine).positions.logprob).all()
