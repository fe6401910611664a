"""The vLLM adapter before anything starts: settings, arguments, refusals, axes. Nothing here needs vLLM."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from presence import must_run

from engines import vllm_caches, vllm_config
from engines.vllm_lifetime import CHANGES, _make_invariant
from engines.vllm_local import VllmAdapter
from engines.vllm_models import ServedModel
from harness.axis import AXES
from harness.choose import choose_plan
from harness.errors import EngineError, Unsupported
from harness.packages import is_installed

ADAPTER = VllmAdapter()
DEFAULTS = {setting.name: setting.default for setting in ADAPTER.settings()}
MODEL = ServedModel(name="m", folder=Path("/models/m"), weights="files", tokenizer=Path("/models/m"))


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(vllm_config, "_cores", lambda: [4, 7])


def arguments(**changed):
    return vllm_config.engine_arguments(MODEL, {**DEFAULTS, "threads": 1, **changed})


def variables(**changed):
    return ADAPTER.environment({"threads": 1, **changed})


def test_importing_the_adapter_is_light():
    code = "import sys, engines.vllm_local; print([n for n in ('torch', 'vllm', 'numpy') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_is_left_to_generation_config_or_free_memory():
    found = arguments()
    assert found["generation_config"] == "vllm"
    assert found["logprobs_mode"] == "raw_logprobs"
    assert found["max_logprobs"] == 20
    assert found["kv_cache_memory_bytes"] == 1 << 30
    assert found["seed"] == 0
    assert found["enable_prefix_caching"] is False


def test_zero_leaves_a_choice_to_vllm_and_anything_else_does_not():
    assert not {"block_size", "num_gpu_blocks_override", "attention_backend"} & set(arguments())
    found = arguments(page_size=32, num_pages=64, attention_backend="TRITON_ATTN")
    assert (found["block_size"], found["num_gpu_blocks_override"]) == (32, 64)
    assert found["attention_backend"] == "TRITON_ATTN"


def test_random_weights_have_a_load_format_of_their_own():
    dummy = ServedModel(name="d", folder=Path("/d"), weights="random", tokenizer=None)
    found = vllm_config.engine_arguments(dummy, {**DEFAULTS, "threads": 1})
    assert (found["load_format"], found["skip_tokenizer_init"]) == (vllm_config.RANDOM_WEIGHTS, True)


def test_drafts_are_vllms_ngram_method():
    assert "speculative_config" not in arguments()
    assert arguments(draft="ngram", draft_length=3)["speculative_config"]["num_speculative_tokens"] == 3


@pytest.mark.parametrize(("ranks", "executor", "found"), [(1, "auto", "uni"), (2, "auto", "mp"), (1, "mp", "mp")])
def test_more_than_one_rank_needs_processes(ranks, executor, found):
    assert arguments(tensor_parallel_size=ranks, executor=executor)["distributed_executor_backend"] == found


@pytest.mark.parametrize(("changed", "words"), [
    ({"data_parallel_size": 2}, "one replica"),
    ({"tensor_parallel_size": 2, "executor": "uni"}, "executor=uni runs one rank"),
    ({"pad_single_rows": True, "enforce_eager": False}, "use enforce_eager=true"),
    ({"threads": 3}, "lower threads to 2"),
    ({"tensor_parallel_size": 2, "threads": 2}, "lower threads to 1"),
    ({"tensor_parallel_size": 3}, "3 ranks need a core each"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_with_the_reason(changed, words):
    with pytest.raises(Unsupported, match=words):
        arguments(**changed)


def test_threads_of_each_rank_are_bound_to_cores_of_its_own():
    assert variables()["VLLM_CPU_OMP_THREADS_BIND"] == "4"
    assert variables(tensor_parallel_size=2)["VLLM_CPU_OMP_THREADS_BIND"] == "4|7"
    assert variables(threads=2)["VLLM_CPU_OMP_THREADS_BIND"] == "4,7"
    assert variables(threads=2)["OMP_NUM_THREADS"] == "2"
    assert variables(threads=9)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(("mode", "batch_invariant", "split_kv", "changed"), [
    ("ordinary", "0", "1", False), ("deterministic", "1", "1", False), ("cpu-invariant", "0", "0", True),
])  # fmt: skip
def test_modes(mode, batch_invariant, split_kv, changed):
    settings = ADAPTER.modes()[mode]
    found = variables(**settings)
    assert (found["VLLM_BATCH_INVARIANT"], found["VLLM_CPU_ATTN_SPLIT_KV"]) == (batch_invariant, split_kv)
    assert {settings[name] for name in CHANGES} == {changed}


class Workers:
    """The part of vLLM's engine that changes its workers."""

    def __init__(self, *, v2):
        self.vllm_config, self.engine_core = SimpleNamespace(use_v2_model_runner=v2), self
        self.asked, self.ended = [], False

    def collective_rpc(self, method):
        self.asked.append(method)

    def shutdown(self):
        self.ended = True


def test_workers_are_changed_as_the_mode_says():
    workers = Workers(v2=False)
    _make_invariant(workers, ADAPTER.modes()["cpu-invariant"])
    assert workers.asked == ["samebits_fix_tiles", "samebits_order_ties", "samebits_pad_single_rows"]
    source = Path(vllm_config.__file__).with_name("vllm_worker.py").read_text()  # importing it needs vLLM
    assert all(f"def {method}(self)" in source for method in workers.asked)
    ordinary = Workers(v2=True)
    _make_invariant(ordinary, ADAPTER.modes()["ordinary"])
    assert ordinary.asked == []


def test_candidates_are_not_ordered_where_another_sampler_reports_them():
    workers = Workers(v2=True)
    with pytest.raises(Unsupported, match="V1 sampler alone"):
        _make_invariant(workers, ADAPTER.modes()["cpu-invariant"])
    assert (workers.asked, workers.ended) == ([], True)


def test_caches_start_empty_and_descriptions_of_classes_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "first"))
    vllm_caches.recall_descriptions()  # nothing is there yet
    made = tmp_path / "first" / "modelinfos"
    (made / "llama.json").write_text("{}")
    (tmp_path / "first" / "torch_compile_cache").mkdir()
    vllm_caches.keep_descriptions()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "second"))
    vllm_caches.recall_descriptions()
    found = sorted(path.relative_to(tmp_path / "second").as_posix() for path in (tmp_path / "second").rglob("*"))
    assert found == ["modelinfos", "modelinfos/llama.json"]


def test_a_mode_sets_the_same_settings_as_every_other():
    """A control's mode replaces what the cell set; a setting that one mode leaves alone would stay behind."""
    assert len({tuple(sorted(mode)) for mode in ADAPTER.modes().values()}) == 1


def test_helpers_are_compiled_only_where_graphs_are_or_when_asked():
    assert variables()["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in variables(enforce_eager=False)
    assert "TORCHDYNAMO_DISABLE" not in variables(compile_helpers=True)


def test_the_model_runner_is_vllms_choice_unless_named():
    assert "VLLM_USE_V2_MODEL_RUNNER" not in variables()
    assert variables(model_runner="v1")["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert variables(model_runner="v2")["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_flashinfers_sampler_is_off_only_where_flashinfer_is_missing(monkeypatch):
    """vLLM 0.26 has it on by default and imports it at the start, whether it is there or not."""
    real = importlib.util.find_spec
    for spec, value in ((None, "0"), (real("json"), None)):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, spec=spec: spec if name == "flashinfer" else real(name)
        )
        assert variables().get("VLLM_USE_FLASHINFER_SAMPLER") == value


def test_every_axis_exists_and_owns_its_own_setting():
    axes = ADAPTER.axes()
    assert set(axes) <= set(AXES)
    names = set(DEFAULTS)
    for name, support in axes.items():
        assert (support.unsupported is None) == bool(support.fields), name
        if name in names and support.unsupported is None:
            assert {f"config.{name}", f"resolved.{name}"} <= set(support.fields), name
        assert AXES[name].kind != "setting" or name in names or support.unsupported, name


def test_derived_fields_of_ranks():
    assert "resolved.num_pages" in ADAPTER.axes()["tensor_parallel_size"].fields
    assert "env.VLLM_CPU_OMP_THREADS_BIND" in ADAPTER.axes()["tensor_parallel_size"].fields


def test_an_unknown_setting_is_an_error():
    with pytest.raises(EngineError, match="no setting 'max_seqs'"):
        ADAPTER.environment({"max_seqs": 1})


@pytest.mark.skipif(is_installed("vllm"), reason="says what is so without vLLM")
def test_without_vllm_a_start_is_unsupported_and_says_how_to_get_it():
    with pytest.raises(Unsupported, match="make vllm"):
        ADAPTER.start("smollm2", {})


@pytest.mark.parametrize(("environ", "found"), [
    ({}, False), ({"CI": "false"}, False), ({"CI": "true"}, True), ({"CI": "1"}, True),
    ({"SAMEBITS_REQUIRE": "vllm"}, True), ({"SAMEBITS_REQUIRE": "other, vllm"}, True),
    ({"SAMEBITS_REQUIRE": "other"}, False),
])  # fmt: skip
def test_where_a_missing_vllm_is_a_failure(environ, found):
    assert must_run(environ, "vllm") is found


@pytest.mark.parametrize("name", ["vllm-axes", "vllm-cpu", "vllm-gpu"])
def test_the_matrices_plan_whole(name):
    plan = choose_plan([name], engine="vllm", model="smollm2", mode=None, assignments=())
    assert all(pair.unsupported is None for pair in plan.pairs)
    assert len(plan.pairs) >= 10


def test_cells_share_engine_processes_where_no_axis_forbids_it():
    plan = choose_plan(["vllm-cpu"], engine="vllm", model="smollm2", mode=None, assignments=())
    assert plan.counts["lifetimes"] <= 13
    invariant = next(pair for pair in plan.pairs if pair.cell.name == "invariant-alone-vs-batch")
    ordinary = next(pair for pair in plan.pairs if pair.cell.name == "alone-vs-batch")
    assert invariant.control_reference == ordinary.reference
    assert invariant.control_varied == ordinary.varied
