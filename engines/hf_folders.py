"""Models as Hugging Face folders, for engines that load those: `tiny` and `smollm2` by name, or a path.

It imports no engine. Rules: a folder appears in the cache whole or not at all; nothing is fetched; the tokenizer is the
bundled engine's, so that ids mean the same on every engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engine import ModelFacts, ModelInfo, Tokenizer
from harness.errors import ModelError
from harness.suggest import did_you_mean

if TYPE_CHECKING:  # numpy stays out of the command line's import
    from engines.bundled.models.source import Source

TINY = "tiny"
SMOLLM2 = "smollm2"
NAMES = (TINY, SMOLLM2)
TINY_VERSION = 1  # of the folder's layout; the weights are engines/bundled/models/tiny.py's


def list_models() -> tuple[ModelInfo, ...]:
    """The named models and the kind of path."""
    from engines.bundled.models import smollm2, tiny

    here = smollm2.gguf_path().is_file()
    return (
        ModelInfo(name=TINY, description=tiny.DESCRIPTION, available=True, how_to_get="always here"),
        ModelInfo(name=SMOLLM2, description="SmolLM2-135M-Instruct as a Hugging Face folder", available=here,
                  how_to_get=smollm2.FETCH),
        ModelInfo(name="FOLDER", description="a Hugging Face folder of a causal language model", available=True,
                  how_to_get="give its path"),
    )  # fmt: skip


def model_facts(model: str) -> ModelFacts:
    """Vocabulary and context, from config.json alone. Raises ModelError."""
    folder = open_folder(model)
    config = read_config(folder)
    try:
        vocab, context = config["vocab_size"], config["max_position_embeddings"]
    except KeyError as error:
        raise ModelError(
            f"{folder / 'config.json'}: expected {error.args[0]!r} at its top level; text-only models alone are run"
        ) from error
    return ModelFacts(name=model, vocab_size=int(str(vocab)), max_position_embeddings=int(str(context)))


def open_tokenizer(model: str) -> Tokenizer:
    """The model's tokenizer. Raises ModelError."""
    from engines.bundled_adapter import harness_errors
    from engines.bundled_tokenizer import HarnessTokenizer

    with harness_errors():
        return HarnessTokenizer(_source(model).tokenizer())


def open_folder(model: str) -> Path:
    """The folder with config.json and weights, built in the cache if need be. Raises ModelError."""
    if model == TINY:
        return _build_tiny()
    if model == SMOLLM2:
        from engines.bundled.models.smollm2 import open_smollm2
        from engines.bundled_adapter import harness_errors

        with harness_errors():
            return open_smollm2().folder
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        hint = did_you_mean(model, NAMES)
        raise ModelError(f"model {model!r}: expected a name or a folder with config.json, found none; {hint}")
    return path.resolve()


def read_config(folder: Path) -> dict[str, object]:
    """config.json as an object. Raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'}: expected readable JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'}: expected an object, got {type(config).__name__}")
    return config


def _source(model: str) -> Source:
    from engines.bundled.models.folder import FolderSource
    from engines.bundled.models.tiny import TinySource

    return TinySource() if model == TINY else FolderSource(open_folder(model), model)


def _build_tiny() -> Path:
    from engines.bundled.models.cache import building, cache_folder
    from engines.bundled.models.tiny import CONFIG
    from engines.bundled_adapter import harness_errors

    target = cache_folder() / "hf" / f"{TINY}-v{TINY_VERSION}"
    with harness_errors(), building(target) as draft:
        if draft is not None:
            _write_tiny(draft, {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": CONFIG.vocab_size,
                "hidden_size": CONFIG.hidden_size, "intermediate_size": CONFIG.intermediate_size,
                "num_hidden_layers": CONFIG.num_hidden_layers, "num_attention_heads": CONFIG.num_attention_heads,
                "num_key_value_heads": CONFIG.num_key_value_heads, "head_dim": CONFIG.head_dim,
                "max_position_embeddings": CONFIG.max_position_embeddings, "rms_norm_eps": CONFIG.rms_norm_eps,
                "rope_theta": CONFIG.rope_theta, "tie_word_embeddings": CONFIG.tie_word_embeddings,
                "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
                "bos_token_id": CONFIG.bos_token_id, "eos_token_id": CONFIG.eos_token_ids[0],
            })  # fmt: skip
    return target


def _write_tiny(draft: Path, config: dict[str, object]) -> None:
    from safetensors.numpy import save_file

    from engines.bundled.models.tiny import make_weights

    save_file(make_weights(), draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "model.safetensors").chmod(0o644)  # safetensors makes it private
    (draft / "config.json").write_text(json.dumps(config, indent=1))
