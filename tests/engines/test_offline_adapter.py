"""What adapters of offline engines stand on: axes from names, and the loop of an engine that goes step by step."""

import dataclasses

import numpy as np
import pytest
from offline_cases import paths, quiet, request, requests, work

from engines.offline_adapter import OfflineAdapter, SteppedEngine, offer_axes
from harness.claims import check_claims
from harness.compare import compare
from harness.engine import AxisSupport, Setting
from harness.errors import EngineError, Unsupported
from harness.schedule import Schedule
from harness.witness import witnessed

SEATS = Setting(name="max_num_seqs", default=4, meaning="seats")


class Counting(SteppedEngine):
    """The best next token is one more than the last; logprobs are exact in float32."""

    def forward(self, texts):
        rows = []
        for text in texts:
            row = np.full(16, -4.0, np.float32)
            row[(text[-1] + 1) % 16] = -0.5
            row[(text[-1] + 2) % 16] = -1.0
            rows.append(row)
        return rows


class Second(Counting):
    features = frozenset({"draws"})

    def take(self, answer, logprobs):
        return int(np.argsort(-logprobs, kind="stable")[1])


class Adapter(OfflineAdapter):
    name = "counting"
    options = (SEATS,)

    def variables(self, settings):
        return {"SEATS": str(settings["max_num_seqs"])}

    def open(self, model, settings):
        return Counting(settings)


def run(engine, given, **options):
    traces = engine.generate(work(given, **options), quiet)
    assert check_claims(traces) == ()
    return traces


def test_an_axis_owns_the_setting_of_its_name_and_what_moves_with_it():
    found = offer_axes({"max_num_seqs": ("resolved.pages",), "batch": ()}, {"restart": "no state"}, (SEATS,),
                       ("cache.*",), ("batch",))  # fmt: skip
    assert found == {
        "max_num_seqs": AxisSupport(
            fields=("config.max_num_seqs", "resolved.max_num_seqs", "resolved.pages", "cache.*")
        ),
        "batch": AxisSupport(fields=("cache.*",), resets=True),
        "restart": AxisSupport(unsupported="no state"),
    }


def test_settings_are_whole_when_an_engine_is_opened_and_unknown_ones_are_refused():
    adapter = Adapter()
    assert adapter.start("tiny", {}).resolved() == {"max_num_seqs": 4}
    assert adapter.environment({"max_num_seqs": 2})["SEATS"] == "2"
    with pytest.raises(EngineError, match="engine 'counting' has no setting 'seats'"):
        adapter.start("tiny", {"seats": 2})


def test_texts_run_together_and_every_step_is_told():
    engine = Counting({})
    alone, together = run(engine, requests(), schedule="alone"), run(engine, requests())
    assert compare(alone, together, "topk", "natural").outcome == "same"
    assert int(witnessed(alone, together, "beside").mask.sum()) > 0
    first = request("p", 3, max_tokens=3)
    assert paths(run(engine, (first,)))["p"] == tuple((first.prompt_token_ids[-1] + i) % 16 for i in (1, 2, 3))


def test_a_golden_path_is_followed_and_the_pick_is_the_samplers():
    traces = run(Counting({}), (request("p", 3),), golden={"p": (5, 9)})
    assert traces.positions.token.tolist() == [5, 9]
    assert traces.positions.pick.tolist()[1] == 6


def test_a_sampler_of_its_own_takes_draws_which_are_refused_otherwise():
    hot = (request("p", 3, temperature=1.0, seed=1),)
    with pytest.raises(Unsupported, match="'p': draws; Counting does not offer that"):
        run(Counting({}), hot)
    assert run(Second({}), hot).positions.pick.tolist() != run(Counting({}), (request("p", 3),)).positions.pick.tolist()


def test_a_companion_leaves_when_it_is_due_and_logits_are_refused():
    made = work(requests())
    first, *rest = made.schedule.arrivals
    leaving = dataclasses.replace(first, companion=True, cancel_after_tokens=2)
    schedule = Schedule(name="leaving", arrivals=(leaving, *rest))
    traces = Counting({}).generate(dataclasses.replace(made, schedule=schedule), quiet)
    assert (traces.requests.finish_reason[0], int(traces.requests.length[0])) == ("abort", 2)
    with pytest.raises(Unsupported, match="no logits"):
        run(Counting({}), requests(), digests=True)
