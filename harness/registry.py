"""The one table through which the command line and the plugin reach engines and reports.

It imports none of them by itself. Rules: names map to "module:attribute"; third parties add engines under the entry
point group `samebits.engines`; what is loaded from our own packages must lie beside `harness`, so that a user's folder
named `engines` or `reports` cannot take its place.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from harness.engine import Adapter
from harness.errors import UsageError
from harness.suggest import did_you_mean

GROUP = "samebits.engines"
ENGINES = {
    "bundled": "engines.bundled_adapter:BundledAdapter",
    "deepinfer": "engines.deepinfer_local:DeepInferAdapter",
    "endpoint": "engines.http.adapter:EndpointAdapter",
    "fake": "engines.fake:FakeAdapter",
    "sglang": "engines.sglang_local:SglangAdapter",
    "transformers": "engines.transformers_local:TransformersAdapter",
    "vllm": "engines.vllm_local:VllmAdapter",
}
REPORTS = "reports:make_reports"
SERVE = "engines.serve.command:serve"
OPS = "engines.ops.command:ops"
TABLE = "reports.table:verdict_table"
PLAIN_TABLE = "reports.table:plain_table"
FIVE_LINES = "reports.table:five_lines"
GATE_COMMENT = "reports.gate_comment:gate_comment"
TREND = "reports.trend:render_trend"
COST_REPORT = "reports.cost:write_cost_report"
COST_TABLE = "reports.cost_table:cost_table"
CENSUS_REPORT = "reports.census:write_census_report"
CENSUS_TABLE = "reports.census:census_table"
EVAL_REPORT = "reports.evaluation:write_evaluation"
EVAL_TABLE = "reports.evaluation:evaluation_table"
GATE_ANNOTATIONS = "reports.gate_comment:gate_annotations"


def engine_names() -> tuple[str, ...]:
    """Names of all engines that can be asked for, ours and third parties'."""
    return tuple(sorted({*ENGINES, *(entry.name for entry in entry_points(group=GROUP))}))


def adapter(name: str) -> Adapter:
    """The adapter of an engine. Raises UsageError with the known names."""
    if name in ENGINES:
        return cast("Adapter", load(ENGINES[name])())
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return cast("Adapter", entry.load()())
    raise UsageError(f"--engine {name!r}: no such engine; {did_you_mean(name, engine_names())}")


def load(target: str) -> type:
    """The attribute behind "module:attribute", from the package beside `harness`. Raises UsageError."""
    module_name, _, attribute = target.partition(":")
    module = importlib.import_module(module_name)
    beside = Path(__file__).resolve().parent.parent
    found = Path(module.__file__ or ".").resolve()
    if beside not in found.parents:
        raise UsageError(
            f"module {module_name!r}: expected the one beside samebits' harness ({beside}), found {found}; "
            "rename the folder that shadows it or run from another directory"
        )
    return cast("type", getattr(module, attribute))
