"""What is sent to vLLM and read from it, held against vLLM's own models of both; no engine is started."""

import dataclasses
import json

import pytest
from endpoint_cases import request
from presence import missing

from engines.http.answer import Answer
from engines.http.dialect import Prompt
from engines.http.dialects.prompt_logprobs import CompletionScorer, VllmScorer
from engines.http.dialects.vllm_generate import VllmGenerate
from engines.http.flavours import FLAVOURS
from engines.vllm_local import NOT_INSTALLED
from harness.packages import is_installed
from harness.request import Grammar

if not is_installed("vllm"):
    missing("vllm", NOT_INSTALLED, module=True)

pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's own imports
]
TEXT, FIRST = (1, 2, 3), 1
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
GRAMMARS = {
    "json_schema": ("json", '{"type": "object"}'),
    "regex": ("regex", "[ab]"),
    "ebnf": ("grammar", 'root ::= "a"'),
}


def scores():
    """A prompt's logprobs as vLLM's engine hands them to its server; token 9 is the best one everywhere."""
    from vllm.logprobs import Logprob

    best = Logprob(logprob=-0.5, rank=1)
    return [None, *({token: Logprob(logprob=-1.5, rank=4), 9: best} for token in TEXT[FIRST:])]


def test_the_logprobs_of_a_prompt_are_read_from_both_interfaces():
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    choice = CompletionResponseChoice(index=0, text="x", prompt_logprobs=scores())
    answers = (
        (CompletionScorer(), CompletionResponse(model="m", choices=[choice], usage=USAGE)),
        (VllmScorer(), GenerateTokensResponse(choices=[], prompt_logprobs=scores())),
    )
    for scorer, answer in answers:
        told = scorer.tell(json.loads(answer.model_dump_json()), TEXT, FIRST, 2)
        assert told == [(-1.5, [(9, -0.5), (token, -1.5)], 9) for token in TEXT[FIRST:]]


def test_what_asks_for_a_path_is_understood():
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    params = GenerateRequest.model_validate(VllmScorer().ask(TEXT, FIRST, 4, "m")).sampling_params
    assert (params.prompt_logprobs, params.max_tokens, params.temperature) == (4, 1, 0.0)
    body = CompletionRequest.model_validate(CompletionScorer().ask(TEXT, FIRST, 0, "m"))
    assert (body.prompt_logprobs, body.max_tokens, body.prompt) == (1, 1, list(TEXT))


def test_streamed_tokens_are_read():
    from vllm.entrypoints.scale_out.token_in_token_out import protocol as own

    top = [own.GenerateLogProb(token_id=7, logprob=-2.0, rank=3), own.GenerateLogProb(token_id=1, logprob=-0.5, rank=1)]
    content = own.GenerateLogProbsContent(token_id=7, logprob=-2.0, rank=3, top_logprobs=top)
    chunks = [
        {"token_ids": [7], "logprobs": own.GenerateLogProbs(content=[content])},
        {"token_ids": [], "logprobs": own.GenerateLogProbs(content=[]), "finish_reason": "length"},
    ]
    events = [
        *(own.GenerateTokensStreamResponse(choices=[own.GenerateTokensStreamChoice(index=0, **one)]) for one in chunks),
        own.GenerateTokensStreamResponse(choices=[], usage=USAGE),
    ]
    answer = Answer(candidates=1)
    for event in events:
        VllmGenerate().read(json.loads(event.model_dump_json()), [answer], 0.0)
    answer.close()
    assert (answer.tokens, answer.logprobs, answer.tops, answer.finish) == ([7], [-2.0], [[(1, -0.5)]], "length")


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("api", ["completions", "generate"])
def test_sampling_and_grammars_are_understood(api, kind):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    field, text = GRAMMARS[kind]
    one = request(temperature=0.5, seed=2**63 + 3, logit_bias=((3, 1.0),), min_p=0.25, repetition_penalty=1.5)
    one = dataclasses.replace(one, grammar=Grammar(kind=kind, text=text))
    body = FLAVOURS["vllm"].interfaces[api].body(one, Prompt(ids=(1, 2)), "m")
    if api == "generate":
        found = GenerateRequest.model_validate(body).sampling_params
    else:
        found = CompletionRequest.model_validate(body).to_sampling_params(64, {})
    assert (found.temperature, found.seed, found.min_p, found.repetition_penalty) == (0.5, 3, 0.25, 1.5)
    assert getattr(found.structured_outputs, field) == text
    assert {int(key): value for key, value in found.logit_bias.items()} == {3: 1.0}
