"""Each request says whether it is decoded on the fast path and how urgent it is; its answer does not depend on it."""

from serving import ask, complete, running

TURNS = "abababababab"
FIELDS = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "logprobs": 3, "temperature": 1.5, "seed": 3}


def test_a_request_may_ask_for_the_fast_path_and_gets_the_same():
    with running(rollback="request", draft_length=6) as server:
        plain = complete(server.port, TURNS, **FIELDS)
        assert server.service.lifetime.engine.fast.tokens == 0
        fast = complete(server.port, TURNS, rollback=True, **FIELDS)
        assert server.service.lifetime.engine.fast.tokens > 0
        assert fast["choices"] == plain["choices"]


def test_a_wish_that_the_server_cannot_grant_is_refused():
    with running() as server:
        for fields, told in (
            ({"rollback": True}, "rollback=request"),
            ({"priority": 3}, "policy=priority"),
        ):
            answer = ask(server.port, "/v1/completions", {"model": "tiny", "prompt": "a", "temperature": 0, **fields})
            assert answer.status == 400
            assert told in answer.json["error"]["message"]
        assert complete(server.port, "a", rollback=False, priority=0, **FIELDS)["choices"]
