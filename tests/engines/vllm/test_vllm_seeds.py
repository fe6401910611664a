"""vLLM keeps seeds as signed 64-bit integers; corpora hold unsigned ones."""

import pytest
from vllm_cases import with_sampling

from engines.vllm_work import SEEDS, Able, parameters_of
from harness.corpus import load_corpus, take
from harness.engine import Work
from harness.schedule import Arrival, Schedule

pytestmark = [pytest.mark.usefixtures("vllm"), pytest.mark.xdist_group("vllm")]


@pytest.mark.parametrize(("seed", "handed"), [(7, 7), (2**63 - 1, 2**63 - 1), (2**63, 0), (2**64 - 1, 2**63 - 1)])
def test_a_seed_beyond_vllms_is_folded(seed, handed):
    assert SEEDS == 2**63
    request = with_sampling(take(load_corpus("smoke"), 1).requests[0], temperature=0.8, seed=seed)
    arrival = Arrival(request=request.id)
    schedule = Schedule(name="alone", arrivals=(arrival,))
    work = Work(requests=(request,), schedule=schedule, replay="natural", golden={}, logits_digests=False)
    able = Able(golden=None, trace=False, text=True, max_model_len=4096)
    assert parameters_of(request, arrival, work, able).seed == handed
