"""A plan in words, for a person to read before anything runs. It does not know engines."""

from __future__ import annotations

from harness.execute import case_requests, describe, planned_tokens
from harness.plan import Pair, Plan

ALONE_TOKENS_S = 30.0  # rates assumed for the estimate: SmolLM2-135M in float32 on two cores
BATCH_TOKENS_S = 150.0
PREFILL_TOKENS_S = 500.0
START_S = 2.5


def plan_text(plan: Plan) -> str:
    """Stages with their cases, pairs with their controls, totals and a rough estimate."""
    settings = " ".join(f"{name}={value}" for name, value in plan.settings)
    lines = [
        f"matrix {plan.matrix.name} ({plan.matrix.path})",
        f"engine {plan.engine}, model {plan.model}, {settings}",
        "",
    ]
    numbers = {case: index for index, case in enumerate((c for stage in plan.stages for c in stage.cases), start=1)}
    for index, stage in enumerate(plan.stages, start=1):
        changed = describe(plan.cases[stage.cases[0]], plan.settings) or "as above"
        lines.append(f"lifetime {index}: {changed}, model {stage.lifetime.model}")
        lines += [f"  case {numbers[case]:>3}  {_case_line(plan, case, numbers)}" for case in stage.cases]
    lines += ["", "pairs"]
    lines += [f"  {_pair_line(pair, numbers)}" for pair in plan.pairs]
    lines += ["", _totals(plan)]
    return "\n".join(lines)


def _totals(plan: Plan) -> str:
    counts = plan.counts
    return (
        f"{counts['cells']} cells, {counts['pairs']} pairs, {counts['cases']} cases, {counts['lifetimes']} lifetimes; "
        f"about {estimate_s(plan) / 60:.1f} minutes for SmolLM2-135M in float32 on two cores"
    )


def estimate_s(plan: Plan) -> float:
    """Seconds at the rates assumed above; an estimate, not a measurement."""
    seconds = START_S * len(plan.stages)
    for case_id, case in plan.cases.items():
        prompt = sum(len(request.prompt_token_ids) for request in case_requests(plan, case))
        one_by_one = case.schedule.name == "alone" or dict(case.lifetime.settings).get("max_num_seqs") == 1
        rate = ALONE_TOKENS_S if one_by_one else BATCH_TOKENS_S
        seconds += prompt / PREFILL_TOKENS_S + planned_tokens(plan, case_id) / rate
    return seconds


def _case_line(plan: Plan, case_id: str, numbers: dict[str, int]) -> str:
    case = plan.cases[case_id]
    forced = f", forced along case {numbers[case.golden]}" if case.golden else ""
    beside = f", beside {case.companions[0]}:{case.companions[2]}" if case.companions else ""
    offset = f", seeds +{case.seed_offset}" if case.seed_offset else ""
    return (f"{case.corpus} ({len(case.requests)} requests) {case.schedule.name}, repetition {case.repetition}"
            f"{beside}{offset}{forced}")  # fmt: skip


def _pair_line(pair: Pair, numbers: dict[str, int]) -> str:
    if pair.unsupported is not None:
        return f"{pair.label:<44} UNSUPPORTED: {pair.unsupported}"
    arms = f"cases {_n(pair.reference, numbers)}, {_n(pair.floor, numbers)} | {_n(pair.varied, numbers)}"
    if pair.control_reference is None:
        return f"{pair.label:<44} {arms}; control {pair.cell.control.kind}"
    control = (f"{_n(pair.control_reference, numbers)}, {_n(pair.control_floor, numbers)} | "
               f"{_n(pair.control_varied, numbers)}")  # fmt: skip
    return f"{pair.label:<44} {arms}; control {control}"


def _n(case: str | None, numbers: dict[str, int]) -> str:
    return str(numbers[case]) if case is not None else "-"
