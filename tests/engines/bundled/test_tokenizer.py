"""Tokenizers: SmolLM2's against known ids, the tiny one by bytes, and chat templates in their sandbox."""

import json

import pytest
from tokenizers import Tokenizer, models

from engines.bundled.errors import ModelError
from engines.bundled.models.smollm2 import open_smollm2
from engines.bundled.tokenizer import ByteTokenizer, FileTokenizer, render_chat

TEXTS = ["", "plain", "Ünïcödé — 漢字 🎉", "tabs\tand\nlines\r\n  spaces", "x = 10 ** 24  # code", "0123456789"]


@pytest.fixture(scope="module")
def smollm2():
    return open_smollm2().tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_gives_a_text_back(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_ids_are_those_of_its_own_tokenizer(smollm2):
    """A space goes with its word, every digit by itself."""
    assert smollm2.encode("The capital of France is Paris.") == (504, 3575, 282, 4649, 314, 7042, 30)
    assert smollm2.encode("10") == smollm2.encode("1") + smollm2.encode("0")
    assert smollm2.encode("<|im_end|>") == (2,)
    assert smollm2.vocab_size == 49152


def test_smollm2_chat_has_its_system_message_and_opens_the_answer(smollm2):
    ids = smollm2.encode_chat([("user", "Hi")])
    assert ids[0] == 1
    assert smollm2.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.decode(smollm2.encode_chat([("system", "S"), ("user", "Hi")])).startswith("<|im_start|>system\nS<")


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_ids(text):
    tokenizer = ByteTokenizer(512)
    assert tokenizer.encode(text) == tuple(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_without_a_byte_have_a_name_and_broken_bytes_a_mark():
    tokenizer = ByteTokenizer(512)
    assert tokenizer.decode([104, 105, 257, 300]) == "hi<|end|><|300|>"
    assert tokenizer.decode([0xC3, 104]) == "\ufffdh"
    assert tokenizer.encode("<|end|>") == tuple(b"<|end|>"), "plain text holds no special tokens"


def test_the_byte_chat_opens_the_answer():
    assert ByteTokenizer(512).encode_chat([("user", "a")]) == (258, 256, *b"user\na", 257, 10, 256, *b"assistant\n")
    assert ByteTokenizer(512).digest != ByteTokenizer(513).digest


def folder(tmp_path, config=None, jinja=None, vocabulary=None):
    tokenizer = Tokenizer(models.WordLevel(vocabulary or {"a": 0, "[U]": 1}, "[U]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    return FileTokenizer(tmp_path)


def test_templates_are_found_in_all_three_places(tmp_path):
    assert folder(tmp_path, {"chat_template": "a"}).encode_chat([]) == (0,)
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    assert folder(tmp_path, {"chat_template": named}).encode_chat([]) == (0,)
    assert folder(tmp_path, {"chat_template": "b"}, jinja="a").encode_chat([]) == (0,)


def test_special_tokens_reach_the_template_written_either_way(tmp_path):
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "B"}, "eos_token": "E"}
    tokenizer = folder(tmp_path, config)
    assert render_chat(tokenizer._template, tokenizer._specials, []) == "BE"


def test_the_digests_see_vocabulary_template_and_specials(tmp_path):
    plain = folder(tmp_path, {"chat_template": "a"})
    digests = {plain.digest}
    digests.add(folder(tmp_path, {"chat_template": "a "}).digest)
    digests.add(folder(tmp_path, {"chat_template": "a", "bos_token": "B"}).digest)
    other = folder(tmp_path, {"chat_template": "a"}, vocabulary={"b": 0, "[U]": 1})
    digests.add(other.digest)
    assert len(digests) == 4
    assert other.template_digest == plain.template_digest


def test_a_model_without_a_template_says_what_to_give_instead(tmp_path):
    with pytest.raises(ModelError, match="has no chat template; give text or token ids"):
        folder(tmp_path).encode_chat([("user", "hi")])


COMPLAINTS = [
    ("{{ raise_exception('no system role') }}", "the chat template refuses these messages: no system role"),
    ("{{ strftime_now('%d') }}", "cannot render these messages: 'strftime_now' is undefined"),
    ("{% if %}", "cannot render these messages"),
    ("{{ messages.__class__.__mro__ }}", "cannot render these messages"),
]


@pytest.mark.parametrize(("template", "message"), COMPLAINTS)
def test_a_template_that_refuses_looks_at_the_clock_or_breaks_is_an_error(template, message):
    with pytest.raises(ModelError, match=message):
        render_chat(template, {}, [("user", "hi")])


def test_a_broken_tokenizer_file_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer.json"):
        FileTokenizer(tmp_path)
