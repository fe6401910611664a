"""vLLM's own server, started, asked over HTTP and ended: what it offers, and cells of the endpoint matrix on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.usefixtures("vllm"), pytest.mark.xdist_group("vllm")]
LINES = (
    {"id": "sea", "text": "The sea at night is", "max_tokens": 16, "temperature": 0.8, "seed": 5},
    {"id": "hill", "text": "On the hill stood a house whose windows", "max_tokens": 16, "temperature": 0.0},
    {"id": "log", "text": "Captain's log, day forty:", "max_tokens": 16, "temperature": 0.9, "seed": 2**64 - 59},
)
CELL = """
schema = 1
name = "{rule}"
invariant = "A seeded answer does not depend on others that are served beside it."
corpus = "{corpus}"
rule = "{rule}"
replay = "natural"
minimum = 8

[axis]
name = "batch"
reference = "alone"
variants = ["together"]

[control]
variant = {{ seed_offset = 1 }}
"""


def samebits(*arguments):
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "harness.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_a_real_server_is_started_judged_and_ended(tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    corpus, matrix, out = tmp_path / "corpus", tmp_path / "matrix", tmp_path / "out"
    frozen = samebits("corpus", "freeze", str(tmp_path / "lines.jsonl"), "--out", str(corpus), "--default",
                      "ignore_eos=true", "--default", "logprobs=5")  # fmt: skip
    assert frozen.returncode == 0, frozen.stderr
    matrix.mkdir()
    (matrix / "matrix.toml").write_text('schema = 1\ndescription = "A test."\n')
    for rule in ("tokens", "topk"):
        (matrix / f"{rule}.toml").write_text(CELL.format(rule=rule, corpus=corpus))
    server = f"{sys.executable} -m vllm.entrypoints.openai.api_server"
    options = "--dtype float32 --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 4096 --enforce-eager"
    settings = {"flavour": "vllm", "program": server, "variables": "VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1",
                "arguments": f"{options} --no-enable-prefix-caching"}  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    result = samebits("run", str(matrix), "--engine", "endpoint", "--model", "smollm2", "--out", str(out), *sets)
    assert (out / "run.json").exists(), result.stderr
    verdicts = {one["cell"]: one for one in json.loads((out / "run.json").read_text())["verdicts"]}
    for one in verdicts.values():  # float32 on some CPU may part them, which is a finding, and no fault of the client
        assert one["verdict"] in ("PASS", "FAIL"), (one["reason"], result.stderr)
        assert one["floor"]["verdict"] == "same"
        assert one["control"]["fired"]
        assert one["comparison"]["witnessed"] >= 8
    headers = [json.loads(file.read_text()) for file in sorted(out.glob("captures/*/capture.json"))]
    assert len(headers) == 4  # alone twice, together, and together with other seeds
    assert all('"server_running_max"' in json.dumps(header) for header in headers)  # its metrics page was read
    assert all('"seeds": "obeyed"' in json.dumps(header) for header in headers)
