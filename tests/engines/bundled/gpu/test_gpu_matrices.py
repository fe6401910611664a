"""The benchmark that runs every matrix on one card: what its parts' processes are given, and what is kept of them."""

import json
import os
import sys
import time
from itertools import pairwise, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4]))

from benchmarks.gpu_matrices import ROOT, SHARES, Ledger, Part, all_parts, cells_of, environment, main, run_part

SHOW = "import json, os; print(json.dumps([os.environ[name] for name in ('PYTHONPATH', 'NCCL_NVLS_ENABLE')]))"


def test_parts_find_modules_where_this_process_does_and_have_its_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"/wheels{os.pathsep}/more")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    part = Part(name="shown", command=(sys.executable, "-c", SHOW), limit=60)
    ledger = Ledger(tmp_path, [part])
    run_part(part, ledger, tmp_path, time.monotonic() + 60)
    state = ledger.states["shown"]
    assert (state.state, state.exit_code) == ("done", 0)
    assert json.loads(state.tail[-1]) == [os.pathsep.join([str(ROOT), "/wheels", "/more"]), "0"]
    assert json.loads((tmp_path / "matrices.json").read_text())["shown"]["exit_code"] == 0
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == str(ROOT)


def test_a_part_past_its_limit_is_cut_and_one_without_time_is_not_started(tmp_path):
    slow = Part(name="slow", command=(sys.executable, "-c", "import time; time.sleep(60)"), limit=1)
    ledger = Ledger(tmp_path, [slow])
    run_part(slow, ledger, tmp_path, time.monotonic() + 60)
    assert ledger.states["slow"].state == "cut"
    run_part(slow, ledger, tmp_path, time.monotonic() + 1)
    assert ledger.states["slow"].state == "not started"


def chosen(part: Part) -> list[str]:
    return [word for before, word in pairwise(part.command) if before == "--cell"]


def test_without_a_card_only_parts_that_need_none_are_left(tmp_path):
    names = {part.name for part in all_parts(tmp_path, "cpu")} - {"smollm2"}
    assert names == {f"portable-{name}-{i + 1}" for name, count in SHARES.items() for i in range(count)}


def test_every_cell_of_a_matrix_is_in_one_part_of_each_arithmetic(tmp_path):
    parts = all_parts(tmp_path, "cuda")
    for name, kind in product(SHARES, ("portable", "tensorcore")):
        of_it = [cell for part in parts if part.name.startswith(f"{kind}-{name}-") for cell in chosen(part)]
        files = {path.stem for path in (ROOT / "cells" / name).glob("*.toml")} - {"matrix"}
        assert sorted(of_it) == sorted(files)
    names = {part.name for part in parts}
    assert "cpu-to-gpu-logits" in names
    of_gpu = {cell for part in parts if "gpu" in part.command[:6] for cell in chosen(part)}
    assert set(cells_of("gpu")) - of_gpu <= {"cpu-to-gpu"}  # where SmolLM2's file is not
    for name in ("gpu", "8b-native", "8b-tensorcore", *({"cpu-to-gpu-logits", "cpu-to-gpu"} & names)):
        assert all(
            (ROOT / "cells/gpu" / f"{cell}.toml").is_file()
            for part in parts
            if part.name == name
            for cell in chosen(part)
        )


def test_cells_that_are_named_are_the_only_ones(tmp_path):
    parts = all_parts(tmp_path, "cpu", ["alone-vs-batch", "samples"])
    assert {part.name: chosen(part) for part in parts if part.name != "smollm2"} == {
        "portable-quick-1": ["alone-vs-batch"], "portable-sampling-1": ["samples"],
    }  # fmt: skip


def test_a_cell_there_is_not_is_an_error_and_not_left_out(monkeypatch, tmp_path, capsys):
    words = ["gpu_matrices.py", str(tmp_path), "--device", "cpu", "--cells", "samples", "sample"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--cells: there is no 'sample' in quick, scheduler, sampling" in capsys.readouterr().err
