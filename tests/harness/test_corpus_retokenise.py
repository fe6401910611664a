"""A corpus for another tokenizer: what is encoded again, folded, or refused."""

from __future__ import annotations

import dataclasses

import pytest
from corpus_making import request_value, write_corpus

from engines.bundled.tokenizer import ByteTokenizer
from harness.corpus import Corpus, load_corpus, retokenise
from harness.errors import CorpusError, ModelError

TOKENIZER = ByteTokenizer(300)


def corpus_of(tmp_path, *values: dict[str, object], arbitrary_ids: tuple[str, ...] = ()) -> Corpus:
    corpus = load_corpus(str(write_corpus(tmp_path / "c", values)))
    return dataclasses.replace(corpus, arbitrary_ids=arbitrary_ids)


def ids_only(name: str = "a", **sampling: object) -> dict[str, object]:
    return {**request_value(name, **sampling), "text": None, "prompt_token_ids": [1, 299, 300, 511]}


def test_text_and_messages_are_encoded_again(tmp_path):
    chat = request_value("b", temperature=0.5, seed=9)
    chat["text"], chat["messages"] = None, [{"role": "user", "content": "x"}]
    corpus = corpus_of(tmp_path, request_value("a"), chat)
    again = retokenise(corpus, TOKENIZER, name="bytes")
    assert again.requests[0].prompt_token_ids == TOKENIZER.encode("text of a")
    assert again.requests[1].prompt_token_ids == TOKENIZER.encode_chat([("user", "x")])
    assert [request.sampling for request in again.requests] == [request.sampling for request in corpus.requests]
    assert (again.tokenizer.name, again.tokenizer.digest) == ("bytes", TOKENIZER.digest)
    assert (again.tokenizer.vocab_size, again.name) == (300, "hand-made")
    assert again.digest != corpus.digest
    assert retokenise(corpus, TOKENIZER).digest == again.digest


def test_the_same_tokenizer_changes_nothing(tmp_path):
    corpus = corpus_of(tmp_path, ids_only(logit_bias=[[5, 1.0]]))

    class Same(ByteTokenizer):
        def encode(self, text):
            raise AssertionError("must not be asked")

    same = Same(512)
    same.digest = corpus.tokenizer_digest
    assert retokenise(corpus, same) is corpus


def test_arbitrary_ids_are_folded_into_the_vocabulary(tmp_path):
    value = ids_only(logit_bias=[[1, 0.5], [301, 0.25], [302, 0.75]], stop_token_ids=[511, 211])
    names = ("logit_bias", "prompt_token_ids", "stop_token_ids")
    (request,) = retokenise(corpus_of(tmp_path, value, arbitrary_ids=names), TOKENIZER).requests
    assert request.prompt_token_ids == (1, 299, 0, 211)
    assert request.sampling.logit_bias == ((1, 0.5), (2, 0.25), (3, 0.75))
    assert request.sampling.stop_token_ids == (211,)


def test_ids_that_mean_something_are_refused_by_name(tmp_path):
    corpus = corpus_of(
        tmp_path,
        ids_only("ids"),
        request_value("bias", logit_bias=[[5, 1.0]]),
        request_value("stop", stop_token_ids=[5]),
        request_value("fine"),
    )
    with pytest.raises(CorpusError) as caught:
        retokenise(corpus, TOKENIZER)
    message = str(caught.value)
    assert "request 'ids' has no text or messages to encode again" in message
    assert "request 'bias': the token ids of logit_bias belong to the old tokenizer" in message
    assert "request 'stop': the token ids of stop_token_ids belong to the old tokenizer" in message
    assert "fine" not in message
    assert "3 mistakes" in message


def test_a_prompt_that_vanishes_is_refused(tmp_path):
    class Empty(ByteTokenizer):
        def encode(self, text):
            return ()

    with pytest.raises(CorpusError, match="request 'a' has no tokens in this tokenizer"):
        retokenise(corpus_of(tmp_path, request_value("a")), Empty(300))


def test_a_template_that_refuses_is_named(tmp_path):
    class Refusing(ByteTokenizer):
        def encode_chat(self, messages):
            raise ModelError("no chat template")

    value = request_value("a")
    value["text"], value["messages"] = None, [{"role": "user", "content": "x"}]
    with pytest.raises(CorpusError, match="request 'a': no chat template"):
        retokenise(corpus_of(tmp_path, value), Refusing(300))


@pytest.mark.parametrize("name", ["smoke", "quick", "ragged", "random"])
def test_shipped_corpora_can_be_used_with_the_smallest_model(name):
    corpus = retokenise(load_corpus(name), ByteTokenizer(512), name="tiny")
    assert {token < 512 for request in corpus.requests for token in request.prompt_token_ids} == {True}
    assert [request.id for request in corpus.requests] == [request.id for request in load_corpus(name).requests]
