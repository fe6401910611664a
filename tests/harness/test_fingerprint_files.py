"""Digests of large files, of a model's files and of kernel caches."""

import json
import os

import pytest

from harness.fingerprint.file_digests import FileDigests
from harness.fingerprint.kernel_caches import CACHES, EMPTY, cache_fields
from harness.fingerprint.model_files import model_fields
from harness.fingerprint.reading import NOT_APPLICABLE


@pytest.fixture
def digests(tmp_path):
    return lambda **options: FileDigests(tmp_path / "cache" / "digests.json", **options)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in (("model.safetensors", "weights"), ("config.json", "{}"), ("tokenizer.json", "[]"),
                       ("tokenizer_config.json", '{"chat_template": "x"}'), ("training_args.bin", "x")):  # fmt: skip
        (folder / name).write_text(text)
    return folder


def by_name(fields):
    return {field.name: field.value for field in fields}


def touch(file, text):
    """Another content of the same length with the same modification time."""
    stat = file.stat()
    file.write_text(text)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_is_read_once_while_it_stays_as_it_is(tmp_path, digests):
    file = tmp_path / "big"
    file.write_text("one")
    first = digests()
    value = first.of(file)
    first.save()
    second = digests()
    assert (second.of(file), second.read) == (value, 0)
    file.write_text("two")  # as long as before, in the same inode, at another time
    third = digests()
    assert third.of(file) != value
    assert third.read == 1


def test_a_full_recheck_finds_what_the_quick_check_cannot(tmp_path, digests):
    file = tmp_path / "big"
    file.write_text("one")
    first = digests()
    value = first.of(file)
    first.save()
    touch(file, "two")
    assert digests().of(file) == value  # inode, size and time are the same
    checked = digests(recheck=True)
    assert checked.of(file) != value
    checked.save()
    assert digests().of(file) == checked.of(file)


@pytest.mark.parametrize("content", ["", "{", '{"schema": 2, "files": {}}', '{"schema": 1, "files": {"a": 3}}'])
def test_a_damaged_cache_is_only_slower(tmp_path, digests, content):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "digests.json").write_text(content)
    (tmp_path / "big").write_text("one")
    assert digests().of(tmp_path / "big") == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"


def test_a_cache_that_cannot_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "big").write_text("one")
    known = FileDigests(tmp_path / "file" / "digests.json")
    known.of(tmp_path / "big")
    known.save()
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("model.safetensors", "model.weights"),
        ("config.json", "model.config"),
        ("tokenizer.json", "model.tokenizer"),
        ("tokenizer_config.json", "model.chat_template"),
    ],
)
def test_each_part_of_a_model_has_a_digest_of_its_own(model, digests, name, field):
    before = by_name(model_fields(model, digests()))
    (model / name).write_text('{"chat_template": "{{ y }}"}')
    after = by_name(model_fields(model, digests()))
    changed = {key for key in before if before[key] != after[key]}
    assert field in changed
    assert changed <= {field, "model.tokenizer"}


def test_what_does_not_decide_is_left_out_and_what_is_missing_is_not_applicable(model, digests):
    before = by_name(model_fields(model, digests()))
    (model / "training_args.bin").write_text("y")
    (model / "README.md").write_text("y")
    assert by_name(model_fields(model, digests())) == before
    assert before["model.generation_config"] == NOT_APPLICABLE
    (model / "model.safetensors").unlink()
    assert by_name(model_fields(model, digests()))["model.weights"] is None


def test_a_model_that_moved_is_the_same_and_a_single_file_is_a_model(model, digests):
    before = by_name(model_fields(model, digests()))
    moved = model.rename(model.parent / "elsewhere")
    assert by_name(model_fields(moved, digests())) == before
    alone = by_name(model_fields(moved / "model.safetensors", digests()))
    assert str(alone["model.weights"]).startswith("sha256:")
    assert alone["model.config"] == NOT_APPLICABLE


def test_caches_are_digested_by_contents_and_empty_is_a_value(tmp_path, digests):
    home = tmp_path / "home"
    home.mkdir()
    assert set(by_name(cache_fields({}, home, digests())).values()) == {EMPTY}
    (home / ".triton" / "cache" / "k").mkdir(parents=True)
    (home / ".triton" / "cache" / "k" / "best.autotune.json").write_text("{}")
    (home / ".triton" / "cache" / "k" / "x.lock").write_text("")
    tuned = by_name(cache_fields({}, home, digests()))
    assert str(tuned["cache.triton"]).startswith("sha256:")
    (home / ".triton" / "cache" / "k" / "y.lock").write_text("")
    (home / ".triton" / "cache" / "k" / "tmp.pid_7_abc").mkdir()  # where Triton writes what it moves to its place
    (home / ".triton" / "cache" / "k" / "tmp.pid_7_abc" / "kernel.cubin").write_text("half")
    assert by_name(cache_fields({}, home, digests())) == tuned
    (home / ".triton" / "cache" / "k" / "best.autotune.json").write_text(json.dumps({"BLOCK": 64}))
    assert by_name(cache_fields({}, home, digests()))["cache.triton"] != tuned["cache.triton"]


def test_a_variable_moves_a_cache_and_no_home_is_unknown(tmp_path, digests):
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "kernel").write_text("x")
    found = by_name(cache_fields({"TRITON_CACHE_DIR": str(tmp_path / "moved")}, None, digests()))
    assert str(found["cache.triton"]).startswith("sha256:")
    assert [found[cache.field] for cache in CACHES if cache.field != "cache.triton"] == [None] * (len(CACHES) - 1)
