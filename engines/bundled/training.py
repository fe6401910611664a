"""A model's forward pass as trainers write it: torch in float32, whole texts at once, padded or packed.

It does not know pages, steps or sampling. Rules: projections, norms and attention are separate torch operations, as in
Hugging Face transformers' Llama; padded: texts side by side, filled up on the right to the longest; packed: texts one
after another in one row, with a block-diagonal mask and positions that begin anew; gradients are not recorded, as when
a trainer computes the logprobs of what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Texts
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from engines.bundled.arithmetic.rope import inverse_frequencies
from engines.bundled.arithmetic.weights import check_weights
from engines.bundled.config import Float32, Model
from engines.bundled.errors import NotSupported

Tensor = torch.Tensor
Layout = Literal["padded", "packed"]
KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MICRO_BATCH = 8  # texts of one padded batch
PACKED_TOKENS = 2048  # tokens of one packed row, unless one text is longer


class Text(NamedTuple):
    """Token ids, and the positions [begin, end) whose logits are wanted."""

    ids: tuple[int, ...]
    begin: int
    end: int


class _Batch(NamedTuple):
    """Token ids (B, L), positions (B, L), a mask (B, 1, L, L), and where each text lies: (row, offset)."""

    ids: Tensor
    position: Tensor
    mask: Tensor
    places: tuple[tuple[int, int], ...]


class TrainingForward:
    """Weights as torch tensors. Raises NotSupported for another family, ValueError for weights that do not fit."""

    def __init__(self, model: Model, layout: Layout) -> None:
        if model.config.architecture not in KNOWN:
            known, found = ", ".join(KNOWN), model.config.architecture
            raise NotSupported(f"trainer={layout}: the training forward knows {known}; {model.name} is {found}")
        check_weights(model)
        self._shape, self._layout = model.config, layout
        self._weights = {name: torch.tensor(array) for name, array in model.weights.items()}
        c = model.config
        self._frequency = torch.tensor(inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))

    def logits(self, texts: Texts[Text]) -> Iterator[Float32]:
        """For each text, in order, the logits (end - begin, vocab) at its wanted positions."""
        for group in group_texts(texts, self._layout):
            batch = self._batch(group)
            with torch.no_grad():
                x = self._forward(batch)
                for (row, offset), text in zip(batch.places, group, strict=True):
                    wanted = x[row, offset + text.begin : offset + text.end]
                    yield functional.linear(wanted, self._head()).numpy()

    def log_softmax(self, logits: Float32) -> Float32:
        """Log-probabilities (N, vocab), by torch."""
        result: Float32 = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        return result

    def _batch(self, group: Texts[Text]) -> _Batch:
        lengths = [len(text.ids) for text in group]
        padded = self._layout == "padded"
        rows, width = (len(group), max(lengths)) if padded else (1, sum(lengths))
        starts = [0] * len(group) if padded else np.cumsum([0, *lengths[:-1]]).tolist()
        ids, position = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
        owner = np.full((rows, width), -1, np.int64)
        places = tuple((index if padded else 0, start) for index, start in enumerate(starts))
        for index, ((row, start), text) in enumerate(zip(places, group, strict=True)):
            here = slice(start, start + len(text.ids))
            ids[row, here], position[row, here], owner[row, here] = text.ids, np.arange(len(text.ids)), index
        return _Batch(
            torch.from_numpy(ids), torch.from_numpy(position), self._mask(torch.from_numpy(owner)), places
        )  # fmt: skip

    def _mask(self, owner: Tensor) -> Tensor:
        """(B, 1, L, L): which keys each token sees, by the text that owns a token; padding sees itself alone."""
        place = torch.arange(owner.shape[1])
        causal = place[:, None] >= place[None, :]
        same = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, :, None]
        return ((same & causal) | torch.eye(owner.shape[1], dtype=torch.bool))[:, None]

    def _forward(self, batch: _Batch) -> Tensor:
        """(B, L, hidden) after the last norm."""
        c, w = self._shape, self._weights
        x = w["model.embed_tokens.weight"][batch.ids]
        angle = batch.position[..., None].float() * self._frequency
        turn = torch.cat([angle, angle], -1)[:, None]  # (B, 1, L, head_dim)
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm")
            x = x + self._attention(normed, layer, batch, turn.cos(), turn.sin())
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate = functional.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._norm(x, "model.norm")

    def _attention(self, x: Tensor, layer: int, batch: _Batch, cosine: Tensor, sine: Tensor) -> Tensor:
        c, name = self._shape, f"model.layers.{layer}.self_attn"
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").view(*x.shape[:2], -1, c.head_dim).transpose(1, 2) for part in "qkv"
        )
        if c.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = (heads * cosine + _half_turned(heads) * sine for heads in (q, k))
        mask = batch.mask
        if window := c.window(layer):
            place = torch.arange(x.shape[1])
            mask = mask & (place[:, None] - place[None, :] < window)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self._linear(out.transpose(1, 2).reshape(*x.shape[:2], -1), f"{name}.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._shape.rms_norm_eps)
        return self._weights[f"{name}.weight"] * scaled

    def _head(self) -> Tensor:
        tied = self._shape.tie_word_embeddings
        return self._weights["model.embed_tokens.weight" if tied else "lm_head.weight"]


def group_texts(texts: Texts[Text], layout: Layout) -> Iterator[tuple[Text, ...]]:
    """The texts of one forward pass after the other: so many when padded, so many tokens when packed."""
    group: list[Text] = []
    for text in texts:
        tokens = sum(len(one.ids) for one in group) + len(text.ids)
        if group and (len(group) == MICRO_BATCH if layout == "padded" else tokens > PACKED_TOKENS):
            yield tuple(group)
            group = []
        group.append(text)
    if group:
        yield tuple(group)


def _half_turned(heads: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    return torch.cat([-heads[..., half:], heads[..., :half]], -1)
