"""torch switches that people believe in and that do nothing for batch invariance."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch

_SEEDERS = frozenset(
    {
        "torch.manual_seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "transformers.set_seed",
        "lightning.seed_everything",
        "numpy.random.seed",
        "random.seed",
    }
)


def find_switches(launch: Launch) -> Iterator[Hit]:
    """Determinism switches of torch in a launch whose mode is off."""
    if launch.mode_on or launch.open:
        return
    for call in launch.calls:
        if call.name not in _SEEDERS:
            yield Hit(call.place, f"{call.name} does not make {launch.engine} independent of the batch", call.name)


def find_seeders(launch: Launch) -> Iterator[Hit]:
    """A global seed in a launch where some sampled request has none."""
    if not any(_unseeded(launch, index) for index in range(len(launch.requests))):
        return
    for call in launch.calls:
        if call.name in _SEEDERS and call.name.startswith(("torch.", "transformers.", "lightning.")):
            yield Hit(call.place, f"{call.name} does not seed {launch.engine}'s requests", call.name)


def _unseeded(launch: Launch, index: int) -> bool:
    request = launch.requests[index]
    if request.open or request.bare:
        return False
    field = request.fields.get("temperature")
    greedy = field is not None and field.kind == "constant" and field.value in ("0", "0.0")
    return not greedy and not {"seed", "sampling_seed", "seq_seed", "random_seed"} & set(request.fields)


RULES = (
    Rule(
        id="torch-not-batch-invariant",
        engine="any",
        severity=Severity.WARNING,
        title="torch's deterministic switches taken for batch invariance",
        why="They fix the order inside one call of one shape; another batch is another shape.",
        mend="Turn the engine's own mode on; keep the switch only for what it does.",
        facts="torch's notes on reproducibility: same inputs, same shapes",
        launch=find_switches,
    ),
    Rule(
        id="torch-manual-seed",
        engine="any",
        severity=Severity.WARNING,
        title="A global torch seed in place of request seeds",
        why="The engine samples in its workers with generators of its own, in arrival order.",
        mend="Give every sampled request its own seed.",
        launch=find_seeders,
    ),
)
