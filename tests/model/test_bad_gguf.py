"""GGUF files that are damaged, or of models that are not read: refused by name."""

import random
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import load_model, save_model
from lockstep.errors import UserError
from lockstep.model import preset, read_config
from lockstep.model.gguf_file import GgufFile
from tests.model.test_gguf import folder_and_file, model_of
from tests.model.write_gguf import write_gguf, write_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small file."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.block_count": 2,
        "eps": 1e-6,
        "tokens": ["a", "bc"],
        "n": [1, 2],
    }
    write_gguf(path, metadata | {"flag": True}, {"a": ("Q8_0", torch.ones(3, 64)), "b": ("F32", torch.ones(5))})
    return path


def test_a_file_that_ends_anywhere_is_refused(tmp_path, whole):
    data = whole.read_bytes()
    assert len(GgufFile(whole).tensors) == 2
    for size in range(len(data)):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(UserError, match="damaged or incomplete; download it again"):
            GgufFile(tmp_path / "cut.gguf")


@given(st.integers(0, 2**32))
def test_changed_bytes_are_refused_or_read_as_something_else(tmp_path_factory, whole, seed):
    draw = random.Random(seed)
    data = bytearray(whole.read_bytes())
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data) - 240)] = draw.choice((0, 1, 9, 127, 255, draw.randrange(256)))
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(data)
    try:
        for tensor in GgufFile(path).tensors.values():
            assert list(tensor[()].shape) == tensor.get_shape()
        load_model(path)
    except UserError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\3\4", "is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF version 1; only 2 and 3 are read"),
        (b"GGUF" + struct.pack(">I", 3), r"a file for big-endian machines"),
    ],
)
def test_other_files_and_versions_are_refused(tmp_path, whole, start, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(start + whole.read_bytes()[len(start) :])
    with pytest.raises(UserError, match=message):
        load_model(path)


def test_a_type_that_is_not_read_is_named_with_what_to_do(tmp_path):
    folder_and_file(tmp_path, "qwen3:micro", "Q4_K")
    with pytest.raises(UserError, match=r"tensor token_embd\.weight is Q4_K; only .*Q8_0.* llama-quantize --allow"):
        load_model(tmp_path / "files")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported in GGUF files"),
        ({"general.architecture": "qwen3mo"}, 'Did you mean "qwen3moe"'),
        ({"split.count": 3}, "is one part of several; join them with llama.cpp: llama-gguf-split --merge"),
        ({"qwen3.attention.sliding_window": 32}, r"key qwen3\.attention\.sliding_window is not known"),
        ({"qwen3.attention.value_length": 16}, r"qwen3\.attention\.value_length is 16; only 32 is supported"),
        ({"qwen3.expert_count": 8}, r"qwen3\.expert_count is 8; only 0 is supported"),
        ({"qwen3.attention.head_count": [4, 2]}, r"head_count is \[4, 2\]; only one number for all layers is read"),
        ({"qwen3.attention.head_count": 3}, "3 heads do not divide into 2 key-value heads"),
        ({"qwen3.attention.layer_norm_rms_epsilon": -1.0}, r"model\.gguf: rms_norm_eps is -1\.0"),
        ({"qwen3.rope.scaling.type": "su", "qwen3.rope.scaling.factor": 2.0}, 'rope type "su" is not supported'),
        ({"qwen3.block_count": 3}, r"tensor model\.layers\.2\..* is missing"),
        ({"general.alignment": 24}, r"general\.alignment is 24, which is not a power of two"),
    ],
)
def test_a_model_that_is_not_read_is_refused_by_what_it_has(tmp_path, qwen, more, message):
    write_model(tmp_path / "model.gguf", *qwen, more=more)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "model.gguf")


@pytest.fixture(scope="module")
def qwen():
    model = model_of("qwen3:micro")
    head = "lm_head.weight"
    return model.config, {n if n == head else f"model.{n}": p.detach() for n, p in model.named_parameters()}


def test_other_divisors_of_the_rotary_frequencies_are_refused(tmp_path):
    folder_and_file(tmp_path, "llama3:micro")
    config = read_config(tmp_path / "folder")
    scaling = replace(config.rope_scaling, factor=4.0)
    model = model_of("llama3:micro")
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    write_model(tmp_path / "four.gguf", replace(config, rope_scaling=scaling), tensors)
    assert read_config(tmp_path / "four.gguf").rope_scaling == scaling
    write_model(
        tmp_path / "base.gguf", replace(config, rope_scaling=scaling), tensors, more={"llama.rope.freq_base": 1e4}
    )
    with pytest.raises(UserError, match=r"rope_freqs\.weight are not the divisors of Llama 3's scaling"):
        load_model(tmp_path / "base.gguf")


def test_one_file_of_a_folder_has_to_be_given_and_safetensors_come_first(tmp_path):
    folder, file = folder_and_file(tmp_path, "qwen3:micro")
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"has 2 GGUF files; give one of them, such as .*model\.gguf"):
        load_model(file.parent)
    save_model(model_of("llama3:micro"), file.parent)
    assert load_model(file.parent).config.family == preset("llama3:micro").family
    assert load_model(file, "float32").config == load_model(folder).config
