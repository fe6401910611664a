"""The vision encoder: the twin's bits in any company, transformers' numbers, and pictures that are read or refused."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import picture_making
import pytest

from engines.bundled.errors import ModelError
from engines.bundled.kernels.library import load
from engines.bundled.vision import twin
from engines.bundled.vision.config import tensor_shapes
from engines.bundled.vision.encoder import Encoder
from engines.bundled.vision.picture import cut, read_png, write_png
from engines.bundled.vision.tiny_vit import CONFIG, tiny_vit

MODEL = tiny_vit()
SIZES = ((3, 2), (1, 1), (5, 4), (1, 7), (20, 14))  # (columns, rows); the last one has more than one chunk of keys
PICTURES = [
    cut(picture_making.picture(i, i, columns * CONFIG.patch_size, rows * CONFIG.patch_size), CONFIG.patch_size)
    for i, (columns, rows) in enumerate(SIZES)
]


def encoder(arithmetic="portable", compiler="auto", threads=1):
    return Encoder(MODEL, load("auto", compiler), arithmetic, threads, 0)


def same(a, b):
    assert a.size > 0
    return a.shape == b.shape and np.array_equal(a.view(np.int32), b.view(np.int32))


@pytest.fixture(scope="module")
def expected():
    return [twin.encode(MODEL, picture) for picture in PICTURES]


def test_the_digest_of_the_tiny_encoder_is_the_same_everywhere():
    assert MODEL.digest == "25df61a0621a7e63fce72b67f53ff57cc5a32551c776824747bf660f16a5ee2f"
    assert {name: w.shape for name, w in MODEL.weights.items()} == tensor_shapes(CONFIG)


@pytest.mark.parametrize("threads", [1, 2])
def test_alone_packed_and_in_any_order_equal_the_twin(expected, threads):
    subject = encoder(threads=threads)
    for picture, wanted in zip(PICTURES, expected, strict=True):
        assert same(subject.encode([picture])[0], wanted)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 2, 0, 4, 1, 3, 3]):
        for index, found in zip(order, subject.encode([PICTURES[i] for i in order]), strict=True):
            assert same(found, expected[index])


def test_the_fallback_gives_the_same_bits(expected):
    found = encoder(compiler="none").encode(PICTURES[:4])
    assert all(same(a, b) for a, b in zip(found, expected, strict=False))


def test_free_depends_on_the_company(expected):
    subject = encoder("free")
    alone, packed = subject.encode([PICTURES[0]])[0], subject.encode(PICTURES)[0]
    assert not same(alone, packed)
    assert np.abs(alone - packed).max() < 1e-4
    assert np.abs(alone - expected[0]).max() < 1e-4


def test_near_transformers_pixtral():
    import torch
    from transformers import PixtralVisionConfig, PixtralVisionModel

    config = PixtralVisionConfig(
        hidden_size=CONFIG.hidden_size, intermediate_size=CONFIG.intermediate_size, patch_size=CONFIG.patch_size,
        num_hidden_layers=CONFIG.num_hidden_layers, num_attention_heads=CONFIG.num_attention_heads, hidden_act="silu",
        image_size=256, rope_parameters={"rope_type": "axial", "rope_theta": CONFIG.rope_theta},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = PixtralVisionModel(config).eval()
    weights = {name: torch.tensor(np.array(w)) for name, w in MODEL.weights.items()}
    shape = theirs.patch_conv.weight.shape
    weights["patch_conv.weight"] = weights["patch_conv.weight"].reshape(shape)
    theirs.load_state_dict(weights)
    for index in (0, 2, 3):
        columns, rows = SIZES[index]
        size = CONFIG.patch_size
        grid = PICTURES[index].values.reshape(rows, columns, 3, size, size)
        pixels = grid.transpose(2, 0, 3, 1, 4).reshape(1, 3, rows * size, columns * size)
        with torch.no_grad():
            out = theirs(torch.tensor(pixels)).last_hidden_state[0].numpy()
        found = encoder().encode([PICTURES[index]])[0]
        assert np.abs(found - out).max() < 2e-5 * np.abs(out).max()


def test_each_part_of_the_encoder_matters():
    """Rows and columns turn by their own frequencies; a transposed picture is another picture."""
    picture = PICTURES[2]
    turned = replace_grid(picture, picture.columns, picture.rows)
    assert not same(encoder().encode([picture])[0], encoder().encode([turned])[0])
    for name in (
        "ln_pre.weight",
        "transformer.layers.1.ffn_norm.weight",
        "transformer.layers.0.attention.k_proj.weight",
    ):
        changed = replace(MODEL, weights={**MODEL.weights, name: MODEL.weights[name][::-1].copy()})
        other = Encoder(changed, load("auto", "auto"), "portable", 1, 0)
        assert not same(other.encode([picture])[0], encoder().encode([picture])[0])


def replace_grid(picture, rows, columns):
    return picture._replace(rows=rows, columns=columns)


def test_a_png_comes_back_as_it_was_written():
    pixels = picture_making.picture(4, 3, 24, 16)
    assert np.array_equal(read_png(write_png(pixels), "x"), pixels)


def made_png(lines, width, height, kind=(8, 2, 0, 0, 0)):
    """A PNG of given filtered lines."""
    body = zlib.compress(b"".join(lines))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, *kind)), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks
    )


def test_filters_are_undone():
    lines = [bytes([0, 1, 2, 3, 10, 20, 30]), bytes([1, 5, 5, 5, 250, 1, 2]), bytes([2, 1, 1, 1, 1, 1, 255])]
    expected = [[[1, 2, 3], [10, 20, 30]], [[5, 5, 5], [255, 6, 7]], [[6, 6, 6], [0, 7, 6]]]
    assert read_png(made_png(lines, 2, 3), "x").tolist() == expected


BAD = [
    (b"GIF89a", "it has no PNG signature"),
    (write_png(np.zeros((8, 8, 3), np.uint8))[:-20], "damaged|requires a buffer"),
    (made_png([b"\0" * 4], 1, 1, (16, 2, 0, 0, 0)), r"\[16, 2, 0, 0, 0\]"),
    (made_png([b"\0" * 4], 1, 1, (8, 2, 0, 0, 1)), r"\[8, 2, 0, 0, 1\]"),
    (made_png([b"\0" * 4], 2, 1), "it holds 4 bytes of pixels"),
    (made_png([b"\4" + b"\0" * 3], 1, 1), "line 0 has filter 4"),
    (made_png([b"\0" * 4], 1 << 20, 1 << 20), "it has 1048576 x 1048576 pixels"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_what_is_no_such_png_is_refused_by_name(data, message):
    with pytest.raises(ModelError, match=rf"album 3: expected an 8-bit RGB PNG without interlacing .*({message})"):
        read_png(data, "album 3")


def test_a_flipped_byte_is_noticed():
    data = bytearray(write_png(picture_making.picture(1, 1, 16, 8)))
    data[60] ^= 1
    with pytest.raises(ModelError, match="is damaged"):
        read_png(bytes(data), "x")


def test_sides_must_be_whole_patches():
    with pytest.raises(ModelError, match="12 x 8 pixels: both sides must be multiples of 8"):
        cut(np.zeros((8, 12, 3), np.uint8), 8)
