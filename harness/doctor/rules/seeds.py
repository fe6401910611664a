"""Seeds of requests: not passed, None, drawn, shared; temperature 0 taken for reproducibility; defaults left alone."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.facts import Field, Request
from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch, Scan

SEED_NAMES = {
    "vllm": ("seed",),
    "sglang": ("sampling_seed", "seed"),
    "deepinfer": ("seq_seed",),
    "tensorrt_llm": ("seed", "random_seed"),
    "endpoint": ("seed", "sampling_seed"),
    "openai": ("seed",),
}


def seed_field(request: Request) -> Field | None:
    """The request's seed, under whatever name its api gives it."""
    for name in SEED_NAMES.get(request.api, ()):
        if name in request.fields:
            return request.fields[name]
    return None


def is_greedy(request: Request) -> bool:
    """Temperature is literally 0."""
    field = request.fields.get("temperature")
    if field is None or field.kind != "constant":
        return False
    try:
        return float(field.value) == 0.0
    except ValueError:
        return False


def _requests(scan: Scan) -> Iterator[Request]:
    for document in scan.documents:
        yield from document.requests


def find_missing(scan: Scan) -> Iterator[Hit]:
    """A sampled request without a seed."""
    for request in _requests(scan):
        if request.api == "deepinfer" or request.api not in SEED_NAMES or request.bare or request.open:
            continue
        if seed_field(request) is None and not is_greedy(request):
            names = SEED_NAMES[request.api]
            yield Hit(request.place, f"the request samples and passes no {names[0]}", names[0])


def find_none(scan: Scan) -> Iterator[Hit]:
    """A seed that is None."""
    for request in _requests(scan):
        field = seed_field(request)
        if field is not None and field.kind == "none" and request.api != "deepinfer" and not is_greedy(request):
            yield Hit(field.place, "the seed is None, which is no seed", "seed")


def find_drawn(scan: Scan) -> Iterator[Hit]:
    """A seed drawn from a clock or a random source."""
    for request in _requests(scan):
        field = seed_field(request)
        if field is not None and field.kind in ("clock", "random"):
            source = "a clock" if field.kind == "clock" else "a random source"
            yield Hit(field.place, f"the seed comes from {source}: the next run has another", "seed")


def find_shared(scan: Scan) -> Iterator[Hit]:
    """One literal seed for many sampled requests."""
    for request in _requests(scan):
        field = seed_field(request)
        if request.shared and field is not None and field.kind == "constant" and not is_greedy(request):
            yield Hit(field.place, f"seed {field.value} serves every request", "seed")


def find_defaults(scan: Scan) -> Iterator[Hit]:
    """Sampling left to generation_config.json or to the server."""
    for request in _requests(scan):
        if request.bare:
            yield Hit(
                request.place, "generate without sampling parameters takes the model's generation_config.json", ""
            )
        elif request.api in ("endpoint", "sglang") and "temperature" not in request.fields and not request.open:
            message = "no temperature is sent: the server takes it from generation_config.json or its own default"
            yield Hit(request.place, message, "temperature")


def find_greedy_trust(launch: Launch) -> Iterator[Hit]:
    """Temperature 0 in a launch whose mode is off."""
    if launch.mode_on or launch.open:
        return
    for request in launch.requests:
        if is_greedy(request) and request.api not in ("openai", "openai-responses", "anthropic"):
            message = f"temperature 0 picks the largest logit, and {launch.engine}'s logits still move with the batch"
            yield Hit(request.fields["temperature"].place, message, "temperature")


RULES = (
    Rule(
        id="seed-missing",
        engine="any",
        severity=Severity.WARNING,
        title="A sampled request without a seed",
        why="Every run draws anew; nobody can tell noise from a change.",
        mend="Pass a seed derived from the request's id.",
        scan=find_missing,
    ),
    Rule(
        id="seed-none",
        engine="any",
        severity=Severity.WARNING,
        title="A seed that is None",
        why="None means that the engine picks one, or draws from a shared stream.",
        mend="Pass a number.",
        scan=find_none,
    ),
    Rule(
        id="seed-drawn",
        engine="any",
        severity=Severity.WARNING,
        title="A seed from a clock or a random source",
        why="The seed is new in every run. `hash()` of a string is random per process too.",
        mend="Derive it from the request's id by a fixed hash, and record it.",
        scan=find_drawn,
    ),
    Rule(
        id="seed-shared",
        engine="any",
        severity=Severity.NOTE,
        title="One seed for all requests",
        why="Equal prompts get equal samples and different prompts share their noise; a group becomes clones.",
        mend="Derive one seed per request.",
        facts="Tencent-Hunyuan/UniRL#208 shows the clones",
        scan=find_shared,
    ),
    Rule(
        id="sampling-defaults",
        engine="any",
        severity=Severity.NOTE,
        title="Sampling left to generation_config.json or the server",
        why="The values change with the model's repository or the server's version; a client sampled at 1.0 unaware.",
        mend="Send temperature, top_p and top_k explicitly, or start vLLM with --generation-config vllm.",
        facts="hasso5703/dgx-spark-qwen38#6",
        scan=find_defaults,
    ),
    Rule(
        id="temperature-zero",
        engine="any",
        severity=Severity.WARNING,
        title="Temperature 0 taken for reproducibility",
        why="Greedy is not reproducible while logits depend on the batch: 8B gave 111 completions of 1000.",
        mend="Turn the engine's deterministic mode on; temperature 0 alone promises nothing.",
        facts="measured on an H200, vLLM 0.26.0",
        launch=find_greedy_trust,
    ),
)
