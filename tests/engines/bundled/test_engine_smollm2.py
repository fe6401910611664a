"""One fixed prompt on SmolLM2: every logit of every position, whichever way the prompt was computed.

The default model must be there: without it these tests fail and say how to get it.
"""

import numpy as np
import pytest
from engine_cases import greedy, kernels, options, request, run_all

from engines.bundled import twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import StepBatch
from engines.bundled.engine import Engine
from engines.bundled.kernels.interface import KernelError
from engines.bundled.kernels.isa import resolve_isa
from engines.bundled.models.smollm2 import open_smollm2

TEXT = (
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n\n"
    "Erosion carried the oldest hills into the sea, grain by grain; nobody noticed until the maps were wrong."
)
PAGE = 16
PAGES = 16
SEQUENCE_PAGES = 4  # of the judged sequence; the rest belongs to the others


@pytest.fixture(scope="module")
def source():
    return open_smollm2()


@pytest.fixture(scope="module")
def model(source):
    return source.model()


@pytest.fixture(scope="module")
def tokens(source):
    tokens = source.tokenizer().encode(TEXT)
    assert 40 <= len(tokens) <= 60
    return tokens


def open_portable(model, **changes):
    return open_arithmetic(model, options(page_size=PAGE, num_pages=PAGES, threads=2, **changes))


@pytest.fixture(scope="module")
def arithmetic(model):
    return open_portable(model)


@pytest.fixture(scope="module")
def one_shot(arithmetic, tokens):
    """Logits (T, vocab) of the prompt computed at once, alone."""
    return run_chunks(arithmetic, tokens, [len(tokens)])


def run_chunks(arithmetic, tokens, sizes, pages=None, others=()):
    """Logits (T, vocab) of `tokens` computed in chunks; `others` run beside in every step, from position 0 on.

    Each of `others` is (tokens, pages): one further token per step, as a decode does.
    """
    table = [pages or [*range(SEQUENCE_PAGES)], *(held for _, held in others)]
    start, rows = 0, []
    for step, size in enumerate(sizes):
        pieces = [(ids[step : step + 1], row, step) for row, (ids, _) in enumerate(others, 1)]
        pieces.insert(len(others) // 2, (tokens[start : start + size], 0, start))
        rows.append(arithmetic.forward(batch_of(pieces, table)))
        start += size
    assert start == len(tokens)
    return np.concatenate(rows)


def batch_of(pieces, table):
    """A step of (tokens, row of the page table, first position); the logits of row 0 are wanted."""
    sequence = [row for ids, row, _ in pieces for _ in ids]
    return StepBatch(
        token=np.array([token for ids, _, _ in pieces for token in ids], np.int32),
        sequence=np.array(sequence, np.int32),
        position=np.array([first + i for ids, _, first in pieces for i in range(len(ids))], np.int32),
        page_table=np.array([[*held, *[-1] * (SEQUENCE_PAGES - len(held))] for held in table], np.int32),
        wanted=np.flatnonzero(np.array(sequence) == 0).astype(np.int32),
    )


def assert_same_bits(found, expected):
    assert found.shape == expected.shape
    assert (found.view(np.int32) != expected.view(np.int32)).sum() == 0


def test_token_by_token(arithmetic, tokens, one_shot):
    assert_same_bits(run_chunks(arithmetic, tokens, [1] * len(tokens)), one_shot)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_chunks_on_shuffled_pages_that_hold_stale_garbage(arithmetic, tokens, one_shot, seed):
    generator = np.random.default_rng(seed)
    pages = generator.permutation(PAGES).tolist()
    stale = generator.integers(0, 49152, SEQUENCE_PAGES * PAGE).tolist()
    run_chunks(arithmetic, stale, [len(stale)], pages[:SEQUENCE_PAGES][::-1])
    cuts = np.sort(generator.choice(np.arange(1, len(tokens)), 5, replace=False))
    sizes = np.diff([0, *cuts, len(tokens)]).tolist()
    assert_same_bits(run_chunks(arithmetic, tokens, sizes, pages[:SEQUENCE_PAGES]), one_shot)


def test_beside_others(arithmetic, tokens, one_shot):
    """Prefill in three chunks while five others decode."""
    generator = np.random.default_rng(3)
    others = [(generator.integers(0, 49152, 3).tolist(), [SEQUENCE_PAGES + i]) for i in range(5)]
    sizes = [20, 1, len(tokens) - 21]
    assert_same_bits(run_chunks(arithmetic, tokens, sizes, others=others), one_shot)


def test_one_thread(model, tokens, one_shot):
    arithmetic = open_arithmetic(model, options(page_size=PAGE, num_pages=PAGES, threads=1))
    assert_same_bits(run_chunks(arithmetic, tokens, [len(tokens)]), one_shot)


def can_run(isa):
    try:
        return resolve_isa(isa) == isa
    except KernelError:
        return False


@pytest.mark.parametrize(("isa", "count"), [("x86-64-v3", None), ("x86-64-v4", None), ("generic", 2)])
def test_other_builds(model, tokens, one_shot, isa, count):
    """The plain build is slow, so it computes the first tokens alone. A level this CPU lacks must be refused."""
    if not can_run(isa):
        assert isa != "generic"
        with pytest.raises(KernelError, match="this CPU lacks"):
            open_portable(model, isa=isa)
        return
    other = open_portable(model, isa=isa)
    assert other.describe()["isa"] == isa
    few = tokens[:count]
    assert_same_bits(run_chunks(other, few, [len(few)]), one_shot[:count])


def test_the_control_differs(model, tokens, one_shot):
    """`free` on the same prompt in chunks: the comparison above can fail."""
    free = open_portable(model, arithmetic="free")
    chunked = run_chunks(free, tokens, [16, len(tokens) - 16])
    assert (chunked.view(np.int32) != run_chunks(free, tokens, [len(tokens)]).view(np.int32)).mean() > 0.5


def test_the_twin(model, tokens, one_shot):
    """The twin takes seconds for each position, so it computes two; they pass all 30 layers and the whole head."""
    assert_same_bits(twin.forward(model, tokens[:2]), one_shot[:2])


@pytest.fixture(scope="module")
def reference(model):
    """transformers' float32 model with the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    with torch.device("meta"):
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size, hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size, num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
                rope_theta=config.rope_theta, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    llama = llama.to_empty(device="cpu")
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in model.weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state)
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config)
    return llama.eval()


def test_logits_and_greedy_text_agree_with_transformers(model, source, reference, arithmetic, tokens, one_shot):
    """One pass of transformers over prompt and output: every output token is its most likely one, too."""
    import torch

    config = options(page_size=PAGE, num_pages=PAGES, threads=2, max_num_batched_tokens=32)
    engine = Engine(model.config, config, arithmetic, kernels(), source.tokenizer().decode)
    (sequence,) = run_all(engine, [request("a", tokens, greedy(max_tokens=24, ignore_eos=False))])
    with torch.no_grad():
        logits = reference(torch.tensor([sequence.tokens])).logits[0].numpy()
    assert np.abs(logits[: len(tokens)] - one_shot).max() < 1e-4
    assert sequence.generated == 24 or sequence.tokens[-1] == 2
    assert logits[len(tokens) - 1 : -1].argmax(axis=1).tolist() == sequence.tokens[len(tokens) :]
