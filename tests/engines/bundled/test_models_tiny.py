"""The tiny model's bits, and the digest of a model."""

import dataclasses

import numpy as np

from engines.bundled.models.digest import model_digest
from engines.bundled.models.tensors import tensor_shapes
from engines.bundled.models.tiny import CONFIG, TinySource

DIGEST = "acb4b34a00a0aa5058e61492ff9e5b811b65985b26eb111ef31cb6d010efb548"


def test_the_tiny_model_is_the_same_everywhere():
    model = TinySource().model()
    assert model.digest == DIGEST
    assert {name: w.shape for name, w in model.weights.items()} == tensor_shapes(CONFIG)
    assert {tensor.dtype for tensor in model.weights.values()} == {np.dtype(np.float32)}


def test_the_digest_sees_every_bit_name_and_shape():
    weights = TinySource().model().weights
    name = "model.norm.weight"
    flipped = weights[name].copy()
    flipped.view(np.int32)[17] ^= 1
    renamed = {("x" if key == name else key): tensor for key, tensor in weights.items()}
    others = [
        model_digest(CONFIG, {**weights, name: flipped}),
        model_digest(CONFIG, renamed),
        model_digest(CONFIG, {**weights, name: weights[name].reshape(8, 8)}),
        model_digest(dataclasses.replace(CONFIG, rope_theta=10001.0), weights),
    ]
    assert DIGEST not in others
    assert len(set(others)) == len(others)
