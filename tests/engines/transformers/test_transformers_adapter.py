"""The adapter before anything starts, and the operators that a package may put in torch's place. Nothing is loaded."""

import importlib.util
import subprocess
import sys
import types

import pytest

from engines import transformers_invariant as invariant
from engines.hf_folders import open_folder, open_tokenizer
from engines.transformers_local import NOT_INSTALLED, TransformersAdapter
from harness.axis import AXES
from harness.choose import choose_plan
from harness.errors import EngineError, ModelError, Unsupported

ADAPTER = TransformersAdapter()
NAMES = {setting.name for setting in ADAPTER.settings()}


def test_importing_the_adapter_is_light():
    heavy = ("numpy", "torch", "transformers")
    code = f"import sys, engines.transformers_local; print([n for n in {heavy} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_axis_exists_and_owns_its_own_setting():
    axes = ADAPTER.axes()
    assert set(axes) <= set(AXES)
    for name, support in axes.items():
        if name in NAMES and support.unsupported is None:
            assert {f"config.{name}", f"resolved.{name}"} <= set(support.fields), name
        assert AXES[name].kind != "setting" or name in NAMES or support.unsupported, name


def test_a_mode_sets_the_same_settings_as_every_other():
    assert len({tuple(sorted(mode)) for mode in ADAPTER.modes().values()}) == 1


@pytest.mark.parametrize(("axis", "replay", "settings", "words"), [
    ("padding", "golden", {"batching": "continuous"}, "needs batching=static"),
    ("page_size", "golden", {}, "needs batching=continuous"),
    ("cached_prefix", "golden", {"batching": "continuous"}, "prefix_cache=true"),
    ("scoring", "natural", {}, "golden replay"),
])  # fmt: skip
def test_what_the_way_of_batching_cannot_vary_is_refused_while_planning(axis, replay, settings, words):
    assert words in ADAPTER.refuses(axis, replay, settings)
    assert ADAPTER.refuses("batch", replay, settings) is None


def test_threads_and_strictness_are_set_before_torch_is_imported():
    found = ADAPTER.environment({"threads": 2, "deterministic_algorithms": True})
    assert (found["OMP_NUM_THREADS"], found["CUBLAS_WORKSPACE_CONFIG"]) == ("2", ":4096:8")
    assert "CUBLAS_WORKSPACE_CONFIG" not in ADAPTER.environment({})


def test_without_transformers_a_start_is_unsupported_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"samebits\[transformers\]") as raised:
        ADAPTER.start("tiny", {})
    assert str(raised.value) == NOT_INSTALLED


def test_an_unknown_setting_and_an_unknown_model_are_errors():
    with pytest.raises(EngineError, match="no setting 'seats'"):
        ADAPTER.environment({"seats": 1})
    with pytest.raises(ModelError, match="known: smollm2, tiny"):
        ADAPTER.model_facts("tyni")


def test_the_tiny_folder_is_the_bundled_engines_model():
    from engines.bundled.models.folder import FolderSource
    from engines.bundled.models.tiny import TinySource

    folder = FolderSource(open_folder("tiny"), "tiny")
    assert folder.config() == TinySource().config()
    assert folder.model().digest == TinySource().model().digest
    assert open_tokenizer("tiny").digest == TinySource().tokenizer().digest
    assert ADAPTER.model_facts("tiny").vocab_size == 512


def test_the_matrix_plans_whole():
    plan = choose_plan(["transformers"], engine="transformers", model="tiny", mode=None, assignments=())
    assert all(pair.unsupported is None for pair in plan.pairs)
    assert len(plan.pairs) == 8


@pytest.fixture
def operators(monkeypatch):
    """The package as it registers itself, without its kernels."""
    package = types.ModuleType("batch_invariant_ops")

    def enable_batch_invariant_mode():
        package._batch_invariant_LIB = types.SimpleNamespace(
            _op_impls={"aten/mm/CUDA", "aten/addmm/CUDA", "aten/_log_softmax/CUDA", "aten/mean.dim/CUDA"}
        )

    package.enable_batch_invariant_mode = enable_batch_invariant_mode
    package.__spec__ = importlib.util.spec_from_loader("batch_invariant_ops", loader=None)
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", package)
    return package


def test_what_the_operators_replace_is_read_from_their_library(operators):
    assert invariant.observe_operators() == {"invariant_operators": "none"}
    invariant.enable_operators("cuda")
    assert invariant.observe_operators() == {
        "invariant_operators": "_log_softmax,addmm,mean.dim,mm",
        "other_operators": "bmm,scaled_dot_product_attention",
    }


def test_the_operators_are_refused_on_a_cpu_and_an_idle_library_is_an_error(operators):
    with pytest.raises(Unsupported, match="on the CPU"):
        invariant.enable_operators("cpu")
    operators.enable_batch_invariant_mode = lambda: None
    with pytest.raises(EngineError, match="registered no operator"):
        invariant.enable_operators("cuda")


def test_without_the_operators_their_mode_is_unsupported():
    with pytest.raises(Unsupported, match="not installed"):
        invariant.enable_operators("cuda")
