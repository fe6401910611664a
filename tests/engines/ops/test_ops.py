"""`samebits ops`: what varies is found and named, what does not is counted; JSON; exit codes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from engines.bundled.models.catalogue import open_source
from engines.ops.measure import COUNTS, classify, ulp_distance, vary_attention, vary_rows
from engines.ops.operators import row_operators
from engines.ops.survey import Subject, open_implementation, survey
from harness.cli import commands
from harness.errors import ModelError, UsageError

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)


def run(*arguments):
    result = CliRunner().invoke(commands, ["ops", *arguments], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.return_value, result.output


def classes_of(function, most=16):
    rows, place, _ = vary_rows(function, X, most)
    return rows, place


def test_a_row_that_depends_on_the_number_of_rows_is_found_with_its_classes():
    def by_count(x):
        step = 0 if len(x) == 1 else 1 if len(x) < 4 else 2
        return x.view(np.int32) + step

    rows, place = classes_of(by_count)
    assert rows.classes == ((1,), (2, 3), (4, 5, 6, 7, 8, 12, 16))
    assert (rows.varies_from, rows.ulp, place.classes) == (2, 2, rows.classes)


def test_a_row_that_depends_on_its_place_is_found():
    def by_place(x):
        return x.view(np.int32) + (np.arange(len(x)) >= 7)[:, None]

    rows, place = classes_of(by_place)
    assert rows.varies_from is None
    assert place.classes == ((1, 2, 3, 4, 5, 6, 7), (8, 12, 16))


def test_one_flipped_bit_is_enough():
    def flip(x):
        out = x.view(np.int32).copy()
        out[0, 3] ^= len(x) == 12
        return out

    rows, _ = classes_of(flip)
    assert (rows.varies_from, rows.ulp) == (12, 1)


def test_attention_is_asked_about_company_padding_and_chunks():
    asked = []

    def function(pieces):
        asked.append(tuple(pieces))
        return np.array([max(piece.keys for piece in pieces) > 620, pieces[0].tokens > 64], np.int32)

    rows, padding, chunking = vary_attention(function, 600, 8)
    assert rows.varies_from is None
    assert (padding.varies_from, chunking.varies_from) == (40, 300)
    assert {len(pieces) for pieces in asked} == {1, 2, 3, 4, 5, 6, 7, 8}


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="expected at least two results"):
        classify("rows", {1: np.zeros(1, np.int32)})


def test_distances_are_counted_in_floats():
    values = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    other = np.array([-0.0, 0.0, np.nextafter(np.float32(1), np.float32(2)), -1.0], np.float32)
    assert ulp_distance(values.view(np.int32), other.view(np.int32)) == 1
    tiny = np.float32(1e-45)
    assert ulp_distance(np.array([-tiny]).view(np.int32), np.array([tiny]).view(np.int32)) == 3
    half = np.array([1.0, -2.0], np.float16).view(np.int16)
    assert ulp_distance(half, half + np.int16(4)) == 4


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_nothing_of_portable_varies(model):
    code, text = run("--impl", "bundled", "--model", model, "--rows", "16", "--repeat", "0")
    assert code == 0
    assert "nothing varies" in text
    assert ("moe" in text) == ("not surveyed: the model has no experts" in text or model == "tiny-moe")
    operators = {line.split("  ")[0] for line in text.splitlines()}
    assert {"linear head", "attention", "rms_norm", "log_softmax", "rope", "swiglu"} <= operators


def test_free_varies_and_the_exit_code_says_so():
    code, text = run("--impl", "bundled", "--model", "tiny", "--arithmetic", "free", "--rows", "8", "--repeat", "0",
                     "--json")  # fmt: skip
    found = json.loads(text)
    varying = {f["operator"] for f in found["findings"] if f["variation"]["varies_from"]}
    assert code == 1
    assert {"linear qkv", "linear head", "attention"} <= varying
    assert not {"rms_norm", "swiglu", "log_softmax", "rope"} & varying
    assert found["schema"] == 1
    assert found["absent"] == {"moe": "the model has no experts"}


def test_the_cost_is_relative_to_torch():
    _, text = run("--impl", "bundled", "--model", "tiny", "--rows", "2", "--repeat", "1", "--threads", "1", "--json")
    assert all(cost > 0 for finding in json.loads(text)["findings"] for cost in finding["cost"])


def test_torch_is_surveyed_in_each_dtype():
    """What varies depends on the CPU; that every call is in some class does not."""
    code, text = run(
        "--impl", "torch", "--model", "tiny-moe", "--rows", "4", "--repeat", "1", "--threads", "1", "--json"
    )
    found = json.loads(text)["findings"]
    assert {f["dtype"] for f in found} == {"float32", "bfloat16"}
    assert code == int(any(f["variation"]["varies_from"] for f in found))
    for finding in found:
        assert finding["cost"] is None
        if finding["variation"]["condition"] == "rows":
            assert sorted(count for group in finding["variation"]["classes"] for count in group) == [1, 2, 3, 4]


def test_both_implementations_compute_the_same_operators():
    """A survey of something else would say nothing: results agree to float32 accuracy."""
    for name in ("tiny", "tiny-moe"):
        config = open_source(name).config()
        ours = open_implementation("bundled", config, "portable", "float32", 1)
        theirs = open_implementation("torch", config, "", "float32", 1)
        for operator in row_operators(config):
            x = np.random.default_rng(1).standard_normal((3, operator.columns)).astype(np.float32)
            a, b = (operator.build(implementation)(x).view(np.float32) for implementation in (ours, theirs))
            assert a.shape == b.shape
            assert np.abs(a - b).max() < 2e-5 * max(1.0, float(np.abs(b).max())), (name, operator.name)


def test_attention_of_both_implementations_agrees_under_every_condition():
    from engines.ops.interface import Piece
    from engines.ops.operators import attention_operator

    config = open_source("tiny").config()
    operator = attention_operator(config)
    ours = operator.build(open_implementation("bundled", config, "portable", "float32", 1), 3)
    theirs = operator.build(open_implementation("torch", config, "", "float32", 1), 3)
    for pieces in ([Piece(1, 600)], [Piece(17, 600)], [Piece(1, 40), Piece(1, 41), Piece(1, 900)]):
        assert np.abs(ours(pieces).view(np.float32) - theirs(pieces).view(np.float32)).max() < 2e-6


def test_counts_are_those_that_tell_kernels_apart():
    assert COUNTS[:5] == (1, 2, 3, 4, 5)
    config = open_source("tiny").config()
    subject = Subject(impl="bundled", arithmetic="portable", config=config, dtypes=("float32",), threads=(1,), rows=2,
                      repeat=0)  # fmt: skip
    assert {f.variation.condition for f in survey(subject).findings} == {"rows", "place", "padding", "chunking"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--impl", "bundled", "--model", "tiny", "--dtype", "bfloat16"), UsageError, "bundled computes in float32"),
        (("--impl", "torch", "--model", "tiny", "--arithmetic", "free"), UsageError, "torch has none to choose"),
        (("--impl", "torch", "--model", "tinny"), ModelError, "did you mean 'tiny'"),
    ],
)
def test_what_cannot_be_surveyed_is_said(arguments, error, message):
    with pytest.raises(error, match=message):
        run(*arguments)
