"""Accepted captures as Parquet: what was kept comes back to the bit, and equal captures are stored once."""

import dataclasses

import numpy as np
import pytest
from release_making import traces

from harness.baseline.folder import Folder
from harness.baseline.prefix import chains
from harness.baseline.table import chained_rules, ends, read_table, stored_chains, traces_of, write_table
from harness.compare import compare
from harness.errors import OutputError, StoreError, UsageError


def odd():
    made = traces((3, 2))
    made.positions.logprob[0] = np.float32(-0.0)
    made.positions.logprob.view(np.uint32)[1] = 0x7FC00123  # a NaN with a payload
    return made


def test_what_was_kept_comes_back_to_the_bit():
    made = odd()
    back = traces_of(read_table(write_table(made, ("logprobs", "topk"))))
    assert back.positions.logprob.view(np.uint32).tolist() == made.positions.logprob.view(np.uint32).tolist()
    assert compare(made, back, "topk", "natural").outcome == "same"


@pytest.mark.parametrize(
    ("keep", "has"), [((), []), (("logprobs",), ["logprob"]), (("logprobs", "topk"), ["logprob", "topk_ids"])]
)
def test_ids_and_digests_are_always_kept_and_the_rest_by_choice(keep, has):
    made = odd()
    table = read_table(write_table(made, keep))
    back = traces_of(table).positions
    assert back.token.tolist() == made.positions.token.tolist()
    assert [name for name in ("logprob", "topk_ids") if getattr(back, name) is not None] == has
    assert chained_rules(table) == ("tokens", "logprobs", "topk")
    assert (
        stored_chains(table, "topk")[next(iter(ends(table, "topk")))].end
        == next(iter(chains(made, "topk").values())).end
    )


def test_the_order_of_requests_and_timings_do_not_change_the_bytes():
    made = traces((3, 3))
    swapped = dataclasses.replace(
        made,
        requests=dataclasses.replace(made.requests, id=("r1", "r0"), arrival_s=np.array([1.0, 2.0])),
        positions=dataclasses.replace(made.positions, **{
            name: np.concatenate([column[3:], column[:3]])
            for name in ("token", "pick", "logprob", "topk_ids", "topk_logprobs")
            if (column := getattr(made.positions, name)) is not None
        }),
    )  # fmt: skip
    assert write_table(swapped, ("topk",)) == write_table(made, ("topk",))


def test_a_rule_that_was_not_kept_is_said():
    made = odd()
    bare = dataclasses.replace(made, positions=dataclasses.replace(made.positions, topk_ids=None, topk_logprobs=None))
    with pytest.raises(StoreError, match="without evidence for rule 'topk'"):
        ends(read_table(write_table(bare, ())), "topk")


@pytest.mark.parametrize("url", ["memory://baselines-test", "{tmp}/deep/er"])
def test_a_folder_keeps_bytes_once_and_checks_them(url, tmp_path):
    folder = Folder(url.format(tmp=tmp_path))
    digest = folder.put(b"content", ".bin")
    assert folder.put(b"content", ".bin") == digest
    assert folder.get(digest, ".bin") == b"content"
    assert folder.names("objects", ".bin") == (f"objects/{digest[:2]}/{digest}.bin",)
    folder.write(f"objects/{digest[:2]}/{digest}.bin", b"other")
    with pytest.raises(StoreError, match="the file was changed; restore it"):
        folder.get(digest, ".bin")
    with pytest.raises(StoreError, match="is missing; restore it from version control"):
        folder.get("0" * 64, ".bin")
    assert folder.read("nothing") is None
    assert folder.names("nowhere", ".bin") == ()


def test_a_folder_that_cannot_be_written_or_opened_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot be written"):
        Folder(str(tmp_path / "file" / "below")).put(b"x", ".bin")
    with pytest.raises(UsageError, match="nosuch://x: cannot be opened"):
        Folder("nosuch://x")


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    folder = Folder(str(tmp_path))
    folder.write("head", b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match="No space left"):
        folder.write("head", b"new")
    assert folder.read("head") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
