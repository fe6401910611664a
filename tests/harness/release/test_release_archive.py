"""The release archive: the same run makes the same bytes, and a flipped byte anywhere is found and named."""

import getpass
import json
import os
import socket
from pathlib import Path

import pytest
from release_making import run_of, samebits, verdict

from engines.fake import ByteTokenizer
from harness.corpus import load_corpus
from harness.corpus.retokenise import retokenise
from harness.engine import Field
from harness.errors import StoreError, UsageError
from harness.fingerprint import field_records
from harness.fingerprint.privacy import Private, private_words, public_field
from harness.release.archive import Disclosure, make_archive
from harness.release.tar import TarFaultError, read_tar, write_tar
from harness.release.verify import verify_archive
from harness.seal import sealed

SECRET = "hunter2-token-value"  # noqa: S105 - made up, to see that it does not leak
USER = "alicesmith"
LOG = ["Traceback", '  File "/home/alicesmith/models/llama/run.py", line 3']


@pytest.fixture(scope="module")
def digest():
    return retokenise(load_corpus("smoke"), ByteTokenizer()).digest


def made(tmp_path, digest, **changes):
    """A finished run with a gate decision beside it."""
    subject = [
        Field(name="config.model_path", value=f"/home/{USER}/models/llama", field_class="identity", source="requested"),
        Field(name="host.name", value="alices-laptop", field_class="context", source="gethostname"),
        Field(name="package.torch", value="2.13.0", field_class="identity", source="metadata"),
    ]
    row = verdict(
        corpus={"name": "smoke", "digest": digest, "requests": 8, "longest_prompt": 9, "weak": "weak corpus: x"},
        error={"message": f"cannot open /home/{USER}/secret/model.gguf with {SECRET}", "log_tail": LOG},
    )
    fields = {"observer": [], "subject": field_records(subject)}
    run = run_of(row, folder=tmp_path, fingerprint=fields, model=f"/home/{USER}/models/llama", **changes)
    (tmp_path / "gate.json").write_text(
        json.dumps(
            sealed(
                {
                    "schema": 1,
                    "run": run.digest,
                    "exit_code": 0,
                    "outcome": "1 PASS",
                    "decided": "2026-03-01T00:00:00Z",
                    "rows": [{"label": row["label"], "verdict": row["verdict"]}],
                    "policy": f"/home/{USER}/gate.toml",
                    "invalid": [],
                    "obsolete": [],
                    "costs": [],
                    "warnings": [],
                }
            )
        )
    )
    return run


def disclosure(**changes):
    private = private_words(
        {"MY_API_TOKEN": SECRET, "HOME": "x"}, user=USER, host="alices-laptop", folders=["/home/alicesmith"]
    )
    return Disclosure(private=private, **changes)


@pytest.fixture(scope="module")
def archive(tmp_path_factory, digest):
    return make_archive(made(tmp_path_factory.mktemp("run"), digest), ByteTokenizer(), disclosure())


def test_the_five_artifacts_are_there_and_whole(archive):
    checked = verify_archive(archive)
    assert (checked.faults, checked.outcome) == ((), "1 PASS")
    names = set(read_tar(archive))
    assert {"cost.json", "fingerprint.json", "gate.json", "matrix.json", "manifest.json", "manifest.sha256"} < names
    assert {"corpus/smoke/manifest.json", "corpus/smoke/requests.jsonl"} < names


def test_the_same_run_makes_the_same_bytes(archive, tmp_path, digest):
    assert make_archive(made(tmp_path, digest), ByteTokenizer(), disclosure()) == archive


@pytest.mark.parametrize("secret", [SECRET, USER, "/home/", "alices-laptop", "Traceback"])
def test_no_secret_user_name_or_path_leaks(archive, secret):
    assert secret.encode() not in archive


def test_what_is_asked_for_is_there(tmp_path, digest):
    content = make_archive(made(tmp_path, digest), ByteTokenizer(), disclosure(logs=True))
    assert b"Traceback" in content
    assert b"alices-laptop" in content


def regions(archive):
    """(name, first byte, end) of every file's content, headers apart."""
    place = 0
    for name, content in sorted(read_tar(archive).items()):
        yield name, place + 512, place + 512 + len(content)
        place += 512 + len(content) + (-len(content) % 512)


def test_a_flipped_byte_anywhere_is_found_and_named(archive):
    where = list(regions(archive))
    end = max(last for _, _, last in where)
    step = max(1, len(archive) // 400)
    places = {*range(0, len(archive), step), 0, len(archive) - 1, end, end + 600}
    places |= {
        place
        for _, first, last in where
        for place in (first - 512, first - 400, first - 380, first - 10, first, last - 1)
    }
    for place in sorted(places):
        broken = bytearray(archive)
        broken[place] ^= 0x20
        faults = verify_archive(bytes(broken)).faults
        assert faults, f"byte {place} was flipped and not found"
        inside = next((name for name, first, last in where if first <= place < last), None)
        if inside is not None:
            assert any(inside in fault for fault in faults), (place, inside, faults)


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 5000])
def test_a_cut_or_grown_archive_is_found(archive, cut):
    assert verify_archive(archive[: len(archive) - cut - 1]).faults
    assert verify_archive(archive + bytes(cut + 1)).faults
    assert verify_archive(b"").faults


def rebuilt(archive, **changes):
    files = read_tar(archive)
    for name, content in changes.items():
        key = name.replace("__", "/").replace("_json", ".json")
        if content is None:
            del files[key]
        else:
            files[key] = content
    return write_tar(files)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cost_json": None}, "cost.json is missing"),
        ({"gate_json": b"{}\n"}, "gate.json was changed: its SHA-256 is"),
        ({"extra": b"x"}, "extra is not in the manifest"),
        ({"manifest_json": b"{}"}, "manifest.json does not have the digest that manifest.sha256 names"),
        ({"manifest_json": None}, "manifest.json is missing"),
    ],
)
def test_files_that_are_missing_changed_or_foreign_are_named(archive, changes, fault):
    assert any(text.startswith(fault) for text in verify_archive(rebuilt(archive, **changes)).faults)


def test_parts_of_two_runs_do_not_make_one_archive(archive):
    import hashlib

    def listed_anew(name, content):
        """The archive with one file replaced, and the manifest written to match."""
        files = read_tar(archive) | {name: content}
        manifest = json.loads(files["manifest.json"])
        for item in manifest["files"]:
            item["sha256"] = hashlib.sha256(files[item["name"]]).hexdigest()
        files["manifest.json"] = json.dumps(manifest).encode()
        files["manifest.sha256"] = f"{hashlib.sha256(files['manifest.json']).hexdigest()}  manifest.json\n".encode()
        return verify_archive(write_tar(files)).faults

    gate = json.loads(read_tar(archive)["gate.json"])
    faults = listed_anew("gate.json", json.dumps(gate | {"run": "0" * 64, "exit_code": 1}).encode())
    assert faults[0].startswith("gate.json is about run 000")
    assert faults[1] == "gate.json decides 1, the manifest says 0"
    assert listed_anew("gate.json", b"[]") == ("gate.json holds no JSON object",)
    matrix = json.loads(read_tar(archive)["matrix.json"])
    matrix["record"]["verdicts"][0] |= {"verdict": "FAIL", "corpus": {"name": "gone:greedy", "digest": "0" * 64}}
    assert listed_anew("matrix.json", json.dumps(matrix).encode()) == (
        "restart[same-new] is FAIL in matrix.json and PASS in gate.json",
        "corpus 'gone' was run and is not in the archive",
    )


def test_what_cannot_be_released_is_said(tmp_path, digest):
    run = made(tmp_path, digest)
    with pytest.raises(UsageError, match="is not at hand, so it cannot be shown that this is the corpus"):
        make_archive(run, None, disclosure())
    with pytest.raises(UsageError, match="it was changed since; restore it, or run again"):
        make_archive(made(tmp_path, "0" * 64), ByteTokenizer(), disclosure())
    (tmp_path / "gate.json").write_text(json.dumps({"schema": 1, "run": "0" * 64}))
    with pytest.raises(StoreError, match="it is about another run"):
        make_archive(run, ByteTokenizer(), disclosure())
    (tmp_path / "gate.json").write_text(json.dumps({"schema": 1, "run": run.digest, "exit_code": 0}))
    with pytest.raises(StoreError, match=r"sha256: missing.*run `samebits gate` again"):
        make_archive(run, ByteTokenizer(), disclosure())
    (tmp_path / "gate.json").unlink()
    with pytest.raises(StoreError, match=r"expected a gate decision.*run `samebits gate`"):
        make_archive(run, ByteTokenizer(), disclosure())


def test_tar_takes_only_what_it_would_write():
    assert read_tar(write_tar({"a": b"1", "b/c": b""})) == {"a": b"1", "b/c": b""}
    swapped = write_tar({"b": b""})[:512] + write_tar({"a": b""})
    with pytest.raises(TarFaultError, match="names are sorted and occur once"):
        read_tar(swapped + bytes(-len(swapped) % 10240))
    with pytest.raises(ValueError, match="is no name of an archived file"):
        write_tar({"x" * 101: b""})


def test_paths_become_digests_in_fingerprints_and_stand_ins_in_prose():
    field = Field(name="config.path", value="/srv/models/x", field_class="identity", source="requested")
    assert str(public_field(field).value).startswith("a path, sha256:")
    kept = Field(name="accelerator.driver", value="x", field_class="identity", source="/proc/driver/nvidia/version")
    assert public_field(kept) is kept
    private = Private(words=(("bob", "<user>"),))
    text = private.redact(
        "bob ran ~/run.py and /opt/x/y.py, not bobsled; see https://example.org/a/b and /etc/os-release"
    )
    assert text == "<user> ran <path> and <path>, not bobsled; see https://example.org/a/b and /etc/os-release"


def test_a_real_run_archives_verifies_and_leaks_nothing(tmp_path):
    """End to end on the fake engine: nothing of this host's user, name, folders or secrets is in the archive."""
    run = tmp_path / "run"
    assert samebits("run", "quick", "--cell", "seeded-natural", "--engine", "fake", "--out", run, "--quiet").code == 0
    early = samebits("release", run)
    assert (early.code, "run `samebits gate`" in early.err) == (2, True)
    assert samebits("gate", run).code == 0
    done = samebits("release", run, SAMEBITS_TEST_TOKEN=SECRET)
    assert done.code == 0, done
    content = (run / "release.tar").read_bytes()
    assert samebits("verify", run / "release.tar").code == 0
    private = [SECRET, str(tmp_path), str(Path.home()) + "/", str(Path.cwd()), socket.gethostname(), os.fspath(run)]
    private += [name for name in (getpass.getuser(),) if name != "root" and len(name) > 3]
    assert [word for word in private if len(word) > 3 and word.encode() in content] == []
    broken = bytearray(content)
    broken[len(content) // 2] ^= 1
    (run / "release.tar").write_bytes(broken)
    found = samebits("verify", run / "release.tar")
    assert (found.code, "was changed" in found.out) == (1, True)
    assert samebits("verify", run / "nothing.tar").code == 2


def test_a_run_that_the_gate_rejected_is_archived_only_as_evidence(tmp_path, digest):
    from release_making import record

    run = tmp_path / "run"
    run.mkdir()
    row = verdict(
        name="FAIL", corpus={"name": "smoke", "digest": digest, "requests": 8, "longest_prompt": 9, "weak": None}
    )
    (run / "run.json").write_text(json.dumps(sealed(record(row))))
    assert samebits("gate", run).code == 1
    refused = samebits("release", run)
    assert (refused.code, "the gate did not accept it (exit code 1" in refused.err) == (2, True)
    assert samebits("release", run, "--rejected").code == 0
