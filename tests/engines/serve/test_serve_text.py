"""Text piece by piece is the text of all tokens, cut before the first stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.bundled.tokenizer import ByteTokenizer
from engines.serve.text import Detokenizer, Text

DECODE = ByteTokenizer(512).decode


def pieces_of(ids, stop=(), keep_stop=False):
    text = Text(DECODE, stop, keep_stop=keep_stop)
    return [text.push(token) for token in ids], text.end(), text


@given(st.lists(st.integers(0, 300), max_size=40))
def test_pieces_together_are_the_text(ids):
    tokens = Detokenizer(DECODE)
    assert "".join([tokens.push(token) for token in ids] + [tokens.flush()]) == DECODE(ids)


def byte_level():
    """A Hugging Face tokenizer whose ids are bytes under their printable names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(alphabet)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    return made


def metaspace():
    """One whose decoder drops the space before a text's first word, so that a token's text depends on its place."""
    words = ["▁", "▁a", "b", "▁▁", "c▁", "é"]
    made = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(words)}, merges=[]))
    made.decoder = decoders.Metaspace()
    return made


@pytest.mark.parametrize("make", [byte_level, metaspace])
@given(data=st.data())
def test_pieces_together_are_the_text_of_other_tokenizers(make, data):
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    tokens = Detokenizer(tokenizer.decode)
    assert "".join([tokens.push(token) for token in ids] + [tokens.flush()]) == tokenizer.decode(ids)


def test_a_character_is_given_out_whole():
    pieces, rest, _ = pieces_of("a€b".encode())
    assert pieces == ["a", "", "", "€", "b"]
    assert rest == ""


def test_bytes_that_never_become_a_character_come_at_the_end():
    pieces, rest, _ = pieces_of([97, 0xE2, 0x82])
    assert (pieces, rest) == (["a", "", ""], "�")


def test_what_may_begin_a_stop_string_is_held_back():
    pieces, rest, text = pieces_of(b"xabaaby", ("aab",))
    assert pieces == ["x", "", "ab", "", "", "", ""]
    assert (rest, text.found) == ("", "aab")


def test_what_was_held_back_comes_when_no_stop_string_does():
    pieces, rest, text = pieces_of(b"xab", ("abc",))
    assert (pieces, rest, text.found) == (["x", "", ""], "ab", None)


def test_the_stop_string_stays_if_asked_for():
    pieces, rest, _ = pieces_of(b"one two three", ("two",), keep_stop=True)
    assert "".join(pieces) + rest == "one two"


@given(st.text("ab€", max_size=30), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string(whole, stop):
    """First by where it is complete, as the engine would end it; then by where it begins."""
    pieces, rest, text = pieces_of(whole.encode(), stop)
    given = "".join(pieces) + rest
    if not any(one in whole for one in stop):
        assert (given, text.found) == (whole, None)
        return
    end = next(n for n in range(len(whole) + 1) if any(one in whole[:n] for one in stop))
    assert given == whole[: min(whole[:end].find(one) for one in stop if one in whole[:end])]
    assert text.found in stop
