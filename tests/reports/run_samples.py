"""Records of runs as `run.json` has them, for the report tests: all pass, failures, mixed, hostile, many."""

from __future__ import annotations

import copy
import random

HOSTILE = (
    "<script>alert(1)</script> | `tick` ``` **b** [l](javascript:x) @all #12 "
    "\x1b[31mred\x00 \u202eevil \ud800 ]]> &amp; \"q\" 'a'"
)


def verdict(cell="max-num-seqs", variant="1-8", name="PASS", **changes):
    reference, _, value = variant.partition("-")
    record = {
        "cell": cell,
        "variant": variant,
        "label": f"{cell}[{variant}]",
        "invariant": "What a request gets does not depend on how many sequences may run together.",
        "rule": "topk",
        "replay": "golden",
        "axis": {
            "name": cell.replace("-", "_"),
            "reference": reference,
            "variant": value,
            "home_layer": "forward",
        },
        "corpus": {
            "name": "quick",
            "digest": "sha256:" + "ab" * 32,
            "requests": 12,
            "longest_prompt": 512,
            "weak": None,
        },
        "verdict": name,
        "expected": None,
        "foreseen": False,
        "reason": "288 positions equal under rule topk",
        "claims": [
            "3456 elements over 288 positions of 12 requests compared",
            "276 positions witnessed (ran beside another request)",
            "control free fired: 231 of 288 positions differ",
        ],
        "caps": [],
        "floor": {
            "verdict": "same",
            "positions": 288,
            "sentence": "the reference twice: 288 positions same",
        },
        "comparison": {
            "requests": 12,
            "positions": 288,
            "elements": 3456,
            "witnessed": 276,
            "differing_positions": 0,
            "differing_requests": 0,
            "fields": {"pick": 0, "logprob": 0, "topk_ids": 0, "topk_logprobs": 0},
        },
        "control": {
            "kind": "mode",
            "value": "free",
            "fired": True,
            "verdict": "231 of 288 positions differ",
            "positions": 288,
            "differing_positions": 231,
        },
        "diagnosis": None,
        "undeclared": [],
        "error": None,
        "cases": {
            "reference": "c3a1f0",
            "floor": "c3a1f1",
            "variant": "9be210",
            "control_reference": "77ab01",
            "control_floor": None,
            "control_variant": "77ab02",
        },
        "digests": {"reference": "sha256:" + "1f" * 32, "variant": "sha256:" + "1f" * 32},
    }
    record.update(changes)
    return record


def failed(cell="alone-vs-batch", variant="alone-batch", requests=12, seed=1, **changes):
    """A FAIL with a diagnosis; `requests` of them, some equal throughout."""
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    rows = []
    for index in range(requests):
        first = draw.choice([None, None, 0, 3, 5, 11, 17, 22])
        where = [] if first is None else sorted({first, *draw.sample(range(first, 24), min(24 - first, 6))})
        rows.append(
            {
                "request": f"quick-{index:02}",
                "positions": 24,
                "differing": len(where),
                "first": first,
                "where": where,
            }
        )
    differing = sum(row["differing"] for row in rows)
    record = verdict(
        cell,
        variant,
        "FAIL",
        reason=f"{differing} of {24 * requests} positions differ, first in request 'quick-01' at position 5",
        claims=[],
        comparison={
            "requests": requests,
            "positions": 24 * requests,
            "elements": 288 * requests,
            "witnessed": 23 * requests,
            "differing_positions": differing,
            "differing_requests": sum(row["differing"] > 0 for row in rows),
            "fields": {"pick": 2, "logprob": differing, "topk_ids": 4, "topk_logprobs": differing - 1},
        },
        diagnosis={
            "layer": "forward",
            "reason": "logprobs differ under golden replay, so the same tokens were computed differently",
            "text": "",
            "first": {
                "request": "quick-01",
                "sample": 0,
                "position": 5,
                "field": "logprob",
                "reference": "-1.3862944",
                "variant": "-1.3862946",
                "ulp": 2,
                "delta_logprob": -2.3841858e-07,
                "tie": "near tie",
                "gap": 0.0125,
            },
            "max_abs_delta_logprob": 2.1457672e-06,
            "max_ulp": 18,
            "kl_k1": 1.2e-08,
            "kl_k3": 3.4e-13,
            "per_request": rows,
        },
        digests={"reference": "sha256:" + "1f" * 32, "variant": "sha256:" + "2e" * 32},
    )
    record.update(changes)
    return record


def run_to_run(cell="alone-vs-batch", variant="alone-batch"):
    record = failed(cell, variant, reason="run-to-run: the reference differs from itself, so no axis is blamed")
    record["floor"] = {"verdict": "different", "positions": 288, "sentence": "the reference twice: different"}
    record.update(comparison=None, control=None)
    return record


def error(cell="process-restart", variant="same-new"):
    return verdict(
        cell,
        variant,
        "ERROR",
        reason="variant: the engine's process ended with status -9",
        claims=[],
        comparison=None,
        floor=None,
        control=None,
        digests={},
        error={
            "message": "variant: the engine's process ended with status -9 (killed: out of memory?)",
            "log_tail": [f"step {n}: 8 running, 4 waiting" for n in range(36)]
            + ["RuntimeError: [enforce fail at alloc_cpu.cpp:118] data. DefaultCPUAllocator: not enough memory"],
        },
    )


def insufficient(cell="arrivals", variant="alone-staggered"):
    return verdict(
        cell,
        variant,
        "INSUFFICIENT",
        reason="more than the axis differs between the arms: config.page_size: 16 -> 32; env.OMP_NUM_THREADS: 2 -> 1",
        claims=[],
        undeclared=[
            "config.page_size: 16 -> 32",
            "package.torch: 2.13.0+cpu -> 2.12.1+cpu",
            "env.OMP_NUM_THREADS: 2 -> not set",
        ],
        comparison=None,
    )


def unsupported(cell="tensor-parallel", variant="1-2", *, foreseen=True):
    return verdict(
        cell, variant, "UNSUPPORTED", reason="needs 2 accelerators, this host has 0", foreseen=foreseen,
        claims=[], comparison=None, floor=None, control=None, digests={},
    )  # fmt: skip


def weak(cell="arrival-order", variant="given-reversed"):
    record = verdict(cell, variant)
    record["corpus"] = {
        "name": "smoke", "digest": "sha256:" + "cd" * 32, "requests": 8, "longest_prompt": 96,
        "weak": "weak corpus: its longest prompt has 96 tokens, under 200; short prompts have passed elsewhere",
    }  # fmt: skip
    return record


def comparator_only(cell="isa", variant="v3-v4"):
    return verdict(
        cell,
        variant,
        control={
            "kind": "planted", "value": "one-ulp", "fired": True,
            "verdict": "comparator only: one ulp planted in a stored capture",
            "positions": 288, "differing_positions": 1,
        },
        caps=["cpu.microcode is unknown on both sides (/proc/cpuinfo has none)"],
    )  # fmt: skip


def field(name, value, field_class="identity", source="test"):
    return {"name": name, "value": value, "class": field_class, "source": source}


def environment():
    host = [
        field("cpu.vendor", "GenuineIntel", source="/proc/cpuinfo"),
        field("cpu.model_name", "Intel(R) Xeon(R) Processor", source="/proc/cpuinfo"),
        field("cpu.isa.level", "x86-64-v4", source="/proc/cpuinfo"),
        field("cpu.isa.flags", "abm avx avx2 avx512bw avx512cd avx512dq avx512f avx512vl fma", source="/proc/cpuinfo"),
        field("os.libc", "glibc 2.36", source="confstr"),
        field("os.libm", "sha256:" + "7f" * 32, source="libm.so.6"),
        field("package.torch", "2.13.0+cpu", source="package metadata"),
        field("accelerator.driver", "not applicable"),
        field("env.OMP_NUM_THREADS", "2", source="environment; OpenMP: splits of sums follow the thread count"),
        field("env.MKL_CBWR", "not set", source="environment; MKL: conditional numerical reproducibility"),
        field("env.OMP_SCHEDULE", "not set", source="environment; OpenMP: which thread sums which part"),
        field("container.image", None, "lineage", "unknown, because a container cannot see its image's digest"),
        field("os.kernel", "Linux 6.1.0", "lineage", "uname"),
        field("host.name", "build-7", "context", "gethostname"),
        field("host.load", 0.42, "context", "getloadavg"),
    ]  # fmt: skip
    subject = [*copy.deepcopy(host), field("engine.weights", "sha256:" + "5a" * 32, source="engine")]
    subject[8]["value"] = "1"
    return {"observer": host, "subject": subject}


def run(verdicts, exit_code=0, outcome=None, **changes):
    record = {
        "schema": 1,
        "samebits": "0.1.0",
        "matrix": {"name": "quick", "path": "cells/quick", "digest": "sha256:" + "ee" * 32},
        "engine": "bundled",
        "model": "smollm2",
        "settings": {"arithmetic": "portable", "threads": 2},
        "chosen": {"arithmetic": "portable"},
        "started": "2026-03-01T12:00:00Z",
        "finished": "2026-03-01T12:02:31Z",
        "seconds": {"total": 151.2, "workers": 146.9, "outside": 4.3},
        "exit_code": exit_code,
        "outcome": outcome or f"{len(verdicts)} of {len(verdicts)} planned pairs PASS",
        "plan": {
            "cells": len({item["cell"] for item in verdicts}), "pairs": len(verdicts), "cases": 3, "lifetimes": 2,
            "judged": len(verdicts),
        },
        "verdicts": verdicts,
        "cases": [
            {
                "id": name, "schedule": schedule, "replay": replay, "repetition": 0,
                "configuration": {"max_num_seqs": 8}, "summary": f"quick, {schedule}, max_num_seqs=8",
                "lifetime": "L1", "requests": 12, "positions": 288, "seconds": seconds, "reused": reused,
                "judged_digest": "sha256:" + "1f" * 32, "process_nonce": "0a" * 16,
            }
            for name, schedule, replay, seconds, reused in (
                ("c3a1f0", "alone", "natural", 9.3, False),
                ("c3a1f1", "alone", "natural", 9.1, True),
                ("9be210", "batch", "golden", 4.2, False),
            )
        ],
        "fingerprint": environment(),
        "cost": None,
    }  # fmt: skip
    record.update(changes)
    return record


def all_pass():
    cells = ["alone-vs-batch", "companions", "max-num-seqs", "chunked-prefill", "process-restart", "threads"]
    return run([*(verdict(cell) for cell in cells), weak(), comparator_only()])


def expected_failure():
    record = failed("known-broken", "off-on")
    record.update(expected="FAIL", reason="as declared: " + record["reason"])
    return record


def mixed():
    approved = failed("scheduler-upgrade", "old-new", seed=5)
    approved.update(verdict="APPROVED")
    return run(
        [
            verdict(), failed(), weak(), error(), insufficient(), unsupported(), approved, comparator_only(),
            expected_failure(), failed("page-size", "16-32", requests=64, seed=9),
        ],
        exit_code=4,
        outcome="1 cell ended in an engine ERROR: process-restart[same-new]",
        cost="deterministic decode runs at 0.91 of free at batch 16 (median of 9 interleaved pairs)",
    )  # fmt: skip


def hostile():
    def spoil(value):
        if isinstance(value, str):
            return HOSTILE
        if isinstance(value, list):
            return [spoil(item) for item in value]
        if isinstance(value, dict):
            return {f"{key}": spoil(item) for key, item in value.items()}
        return value

    record = mixed()
    for item in record["verdicts"]:
        name, expected = item["verdict"], item["expected"]
        item.update(spoil({key: value for key, value in item.items() if key not in ("axis", "control")}))
        item["axis"], item["control"] = (
            spoil(item["axis"]),
            item["control"] and {**spoil(item["control"]), "kind": "mode"},
        )
        item.update(verdict=name, expected=expected)
    for key in ("matrix", "engine", "model", "outcome", "settings", "chosen", "started", "finished", "cases", "cost"):
        record[key] = spoil(record[key])
    record["fingerprint"]["subject"] = [
        {**item, "name": HOSTILE, "value": HOSTILE} for item in record["fingerprint"]["subject"]
    ]
    return record


def many(count=400):
    cells = [
        verdict(f"cell-{index:03}-with-a-long-name-that-goes-on-{'and-on-' * 6}end", "1-8") for index in range(count)
    ]
    cells += [failed(f"failing-{index:03}", "1-8", seed=index) for index in range(count // 2)]
    return run(cells, exit_code=1, outcome="many cells FAILED and nobody has signed for it")


def nulls(value):
    """The record with every value that is not the schema number set to null, in place of containers too."""
    return {key: item if key == "schema" else None for key, item in value.items()}


def inner_nulls(value):
    """The record with every leaf null, containers kept."""
    if isinstance(value, dict):
        return {key: item if key == "schema" else inner_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [inner_nulls(item) for item in value]
    return None
