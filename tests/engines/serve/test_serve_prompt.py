"""What the prompt was worth: prompt_logprobs, echo, and how much of it came from the cache."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ask, bits, chat, complete, metrics, running

from engines.bundled.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(512)
TEXT = "a prompt that is long enough to be computed in more than one chunk of sixty-four tokens, "
GREEDY = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 4}


@pytest.fixture(scope="module")
def port():
    with running() as server:
        yield server.port


def by_id(entry):
    """Candidates of one token by id, as bits."""
    return {int(token): bits(value["logprob"]) for token, value in entry.items()}


def generated(choice):
    """The same of generated positions: the token's own bits."""
    return [bits(number) for number in choice["logprobs"]["token_logprobs"]]


def test_a_prompt_is_worth_what_its_tokens_were_worth_when_they_were_generated(port):
    (spoken,) = complete(port, TEXT, **GREEDY)["choices"]
    ids = [*TEXT.encode(), *spoken["token_ids"]]
    answer = complete(port, ids, prompt_logprobs=4, max_tokens=1)
    (choice,) = answer["choices"]
    entries = choice["prompt_logprobs"]
    assert (len(entries), entries[0]) == (len(ids), None)
    tail = entries[len(TEXT) :]
    assert [by_id(entry)[token] for entry, token in zip(tail, spoken["token_ids"], strict=True)] == generated(spoken)
    assert [int(next(iter(entry))) for entry in entries[1:]] == ids[1:], "the token itself comes first"
    assert {len(entry) for entry in entries[1:]} <= {4, 5}
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_ranks_count_candidates(port):
    (choice,) = complete(port, TEXT, prompt_logprobs=3, max_tokens=1)["choices"]
    for entry in choice["prompt_logprobs"][1:]:
        own = next(iter(entry.values()))
        ranked = sorted((value["rank"] for value in entry.values() if value["rank"]), key=int)
        assert ranked == [1, 2, 3]
        best = {value["rank"]: value["logprob"] for value in entry.values()}
        assert best[1] >= best[2] >= best[3]
        assert own["rank"] is not None or own["logprob"] <= best[3]
    token, value = next(iter(choice["prompt_logprobs"][1].items()))
    assert value["decoded_token"] == TOKENIZER.decode([int(token)]) == TEXT[1]
    (bare,) = complete(port, TEXT, prompt_logprobs=0, max_tokens=1)["choices"]
    (both,) = complete(port, TEXT, prompt_logprobs=0, logprobs=5, echo=True, max_tokens=1)["choices"]
    assert both["prompt_logprobs"] == bare["prompt_logprobs"]
    assert [list(entry) for entry in bare["prompt_logprobs"][1:]] == [[str(byte)] for byte in TEXT[1:].encode()]


def test_prompt_logprobs_change_nothing_else(port):
    fields = {**GREEDY, "temperature": 0.8, "seed": 5, "n": 2, "stop": ["x"], "repetition_penalty": 1.2}
    plain = complete(port, [TEXT, "x"], **fields)
    before = metrics(port)
    asked = complete(port, [TEXT, "x"], prompt_logprobs=2, **fields)
    after = metrics(port)
    shown = [choice.pop("prompt_logprobs") for choice in asked["choices"]]
    assert asked["choices"] == plain["choices"]
    assert asked["usage"] == plain["usage"]
    assert shown[0] == shown[1] != shown[2]
    assert shown[2] == shown[3] == [None], "a prompt of one token has no context"
    for name, value in (("admitted", 4), ("prompt", 2 * len(TEXT) + 2)):
        key = f"samebits_{name}_tokens_total" if name == "prompt" else f"samebits_requests_{name}_total"
        assert after[key] - before[key] == value
    grown = after["samebits_generation_tokens_total"] - before["samebits_generation_tokens_total"]
    assert grown == asked["usage"]["completion_tokens"]


def test_chat_shows_them_beside_the_choices(port):
    answer = chat(port, prompt_logprobs=1, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    assert [None, *(int(next(iter(entry))) for entry in answer["prompt_logprobs"][1:])] == [None, *ids[1:]]
    assert "prompt_logprobs" not in chat(port)


def test_scores_are_the_same_in_company_and_with_every_feature(port):
    expected = complete(port, TEXT, prompt_logprobs=5, **GREEDY)["choices"]
    for settings in (
        {"prefix_cache": True},
        {"draft": "lookup", "max_num_batched_tokens": 16},
        {"num_pages": 28, "max_num_seqs": 4},
    ):
        with running(**settings) as server:
            with ThreadPoolExecutor(3) as pool:
                asked = [pool.submit(complete, server.port, TEXT, prompt_logprobs=5, **GREEDY) for _ in range(3)]
            assert [one.result()["choices"] for one in asked] == [expected] * 3, settings
            assert complete(server.port, TEXT, prompt_logprobs=5, **GREEDY)["choices"] == expected


def test_a_prompt_is_scored_many_tokens_in_a_step(port):
    before = metrics(port)["samebits_steps_total"]
    complete(port, TEXT, prompt_logprobs=1, max_tokens=1)
    assert metrics(port)["samebits_steps_total"] - before <= 6


# Echo


def test_echo_puts_the_prompt_before_the_text(port):
    plain = complete(port, TEXT, max_tokens=6, ignore_eos=True)["choices"][0]
    (choice,) = complete(port, TEXT, max_tokens=6, ignore_eos=True, echo=True)["choices"]
    assert choice == {**plain, "text": TEXT + plain["text"]}


def test_echoed_logprobs_begin_with_none_and_agree_with_prompt_logprobs(port):
    text = "né, and a € more"  # tokens are bytes: characters of several
    plain = complete(port, text, **GREEDY)["choices"][0]
    (choice,) = complete(port, text, echo=True, prompt_logprobs=7, **GREEDY)["choices"]
    lists, count = choice["logprobs"], len(text.encode())
    assert {len(value) for value in lists.values()} == {count + 12}
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    worth = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
    assert lists["token_logprobs"][1:count] == worth
    assert lists["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
    assert lists["top_logprobs"][count:] == plain["logprobs"]["top_logprobs"]
    assert {len(top) for top in lists["top_logprobs"][1:count]} <= {4, 5}
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {7, 8}
    assert lists["text_offset"][count:] == [len(text) + offset for offset in plain["logprobs"]["text_offset"]]
    assert lists["text_offset"][:4] == [0, 1, 1, 2]
    assert all(math.isfinite(number) for number in lists["token_logprobs"][1:])


# Cached tokens


def test_cached_tokens_are_told_per_answer_and_counted():
    with running(prefix_cache=True) as server:
        cold = complete(server.port, TEXT, **GREEDY)
        warm = complete(server.port, [TEXT, TEXT[:40] + "else"], n=2, **GREEDY)
        count = len(TEXT) // 8 * 8 - (8 if len(TEXT) % 8 == 0 else 0)
        assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": count + 40}
        assert [choice["token_ids"] for choice in warm["choices"][:1]] == [cold["choices"][0]["token_ids"]]
        assert metrics(server.port)["samebits_cached_tokens_total"] == 2 * (count + 40)
        body = {"model": "tiny", "prompt": TEXT, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        events = ask(server.port, "/v1/completions", body).raw.decode()
        assert f'"prompt_tokens_details":{{"cached_tokens":{count}}}' in events
