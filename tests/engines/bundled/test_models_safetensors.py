"""The safetensors reader against the format's own library, and what it refuses."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engines.bundled.errors import ModelError
from engines.bundled.models.safetensors_file import read_tensors, write_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_float_becomes_its_float32(tmp_path, dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = {"b": torch.randn(3, 5, generator=generator).to(dtype), "a": torch.tensor([1e-6, -0.0, 3e4]).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_tensors(tmp_path / "model.safetensors")
    assert sorted(read) == ["a", "b"]
    for name, tensor in tensors.items():
        assert read[name].view(np.int32).tolist() == tensor.to(torch.float32).view(torch.int32).tolist()


def test_what_is_written_is_read_back_and_by_the_library_too(tmp_path):
    from safetensors.numpy import load_file

    path = tmp_path / "x.safetensors"
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([-0.0])}
    write_tensors(path, {name: tensor.shape for name, tensor in tensors.items()}, tensors.items())
    for read in (read_tensors(path), load_file(path)):
        assert {name: tensor.tobytes() for name, tensor in read.items()} == {
            name: tensor.tobytes() for name, tensor in tensors.items()
        }
    assert not read_tensors(path)["a"].flags.writeable


def test_tensors_come_in_the_announced_order(tmp_path):
    with pytest.raises(ValueError, match=r"tensor b .* written where a"):
        write_tensors(tmp_path / "x", {"a": (1,)}, [("b", np.zeros(1, np.float32))])


def written(tmp_path, header, data=b""):
    path = tmp_path / "x.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def test_a_file_cut_short_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"expected at least \d+ bytes, found \d+"):
        read_tensors(written(tmp_path, entry(), b"1234"))


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 40])
def test_what_is_no_safetensors_file_is_an_error(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a safetensors file, or cut short"):
        read_tensors(path) if content else read_header_of(path)


def read_header_of(path):
    from engines.bundled.models.safetensors_file import read_header

    return read_header(path)


@pytest.mark.parametrize("header", [b"[1, 2]", b"{nonsense", {"t": {"dtype": "F32"}}])
def test_a_header_that_cannot_be_read_is_an_error(tmp_path, header):
    with pytest.raises(ModelError, match="its safetensors header cannot be read"):
        read_tensors(written(tmp_path, header, b"12345678"))


def test_other_types_are_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match="tensor t is F8_E4M3; supported: BF16, F16, F32"):
        read_tensors(written(tmp_path, entry("F8_E4M3"), b"12345678"))


def test_a_shape_that_does_not_fit_its_bytes_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"tensor t of shape \(3,\) has 8 bytes of F32"):
        read_tensors(written(tmp_path, entry(shape=(3,)), b"12345678"))
