"""GGUF files: llama.cpp's values, the names and settings of the folder that was converted, and its tokenizer."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict

from lockstep import build_model, load_model, save_model
from lockstep.checkpoint.convert import convert
from lockstep.cli import main
from lockstep.data import load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.tokenizer import tokenizer_folder, train_bpe
from lockstep.errors import UserError
from lockstep.model import RopeScaling, folder_dtype, preset, read_config
from lockstep.model.folder import digest
from lockstep.model.gguf_blocks import TYPES
from lockstep.model.gguf_file import GgufFile, GgufTensor
from tests.model.gguf_types import BLOCK, NUMBER
from tests.model.write_gguf import write_gguf, write_model

FAMILIES = ("llama3:micro", "qwen3:micro", "qwen3_moe:micro")
LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 8192)


def model_of(family, **fields):
    scaling = LLAMA3 if family == "llama3:micro" else None
    shape = replace(preset(family, 96, (3, 7)), num_layers=2, rope_scaling=scaling, **fields)
    return build_model(shape, "float32", seed=0)


def folder_and_file(place, family, kind="F32", **fields):
    """A model as a folder and as a file."""
    save_model(model_of(family, **fields), place / "folder")
    (place / "files").mkdir()
    tensors = load_file(place / "folder" / "model.safetensors")
    write_model(file := place / "files" / "model.gguf", read_config(place / "folder"), tensors, kind)
    return place / "folder", file


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_is_the_folder_that_was_converted(tmp_path, family, tied):
    folder, file = folder_and_file(tmp_path, family, tie_embeddings=tied)
    expected = load_model(folder)
    for name in (file, file.parent):  # the only file of a folder
        found = load_model(name, "float32")
        assert found.config == expected.config
        for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other), name


def test_weights_are_read_in_pieces_to_the_same_bits(tmp_path, monkeypatch):
    _, file = folder_and_file(tmp_path, "qwen3_moe:micro", "Q8_0")
    expected = load_model(file)
    monkeypatch.setattr("lockstep.model.checkpoint.ELEMENTS", 20_000)
    for (name, one), other in zip(load_model(file).named_parameters(), expected.parameters()):
        assert torch.equal(one, other), name


def test_the_test_files_are_read_alike_by_transformers(tmp_path):
    _, file = folder_and_file(tmp_path, "qwen3:micro", "Q8_0")
    header, ours = GgufHeader.from_file(str(file)), GgufFile(file)
    for name, theirs in load_gguf_state_dict(header).items():
        assert ours.tensors[name].bytes.tobytes() == theirs[...].view(-1).view(torch.uint8).numpy().tobytes(), name
    assert header.architecture == ours.metadata["general.architecture"]


@pytest.mark.parametrize("kind", BLOCK)
def test_every_type_has_transformers_values(kind):
    size, each = BLOCK[kind]
    blocks = torch.randint(256, (600, each), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = TYPES[NUMBER[kind]].decode(blocks)
    expected = dequantize(blocks.flatten(), NUMBER[kind]).view(600, size)
    assert found.dtype == torch.float32 and found.isfinite().all(-1).sum() > 500
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    same = found.isnan() | (torch.signbit(found) == torch.signbit(expected))
    assert same.all() and ((found == 0).any() or kind == "Q4_1"), "zeros have their sign"


@given(st.data(), st.sampled_from(sorted(TYPES)))
def test_any_place_of_a_tensor_can_be_read(data, number):
    kind = TYPES[number]
    shape = [data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), kind.values * data.draw(st.integers(1, 3))]
    stored = np.random.default_rng(0).integers(0, 60, shape[0] * shape[1] * shape[2] * kind.size // kind.values)
    tensor = GgufTensor(Path("f"), stored.astype(np.uint8), "t", kind, shape, 0)
    whole = kind.decode(torch.from_numpy(stored.astype(np.uint8)).view(-1, kind.size)).view(shape)
    place = tuple(slice(*sorted(data.draw(st.tuples(*2 * [st.integers(0, size)])))) for size in shape)
    assert torch.equal(tensor[place], whole[place]) and torch.equal(tensor[place[:1]], whole[place[:1]])


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "bfloat16"), ("Q4_0", "bfloat16"), ("BF16", "bfloat16")])
def test_a_quantized_file_is_close_to_its_folder_and_is_converted_to_one_with_the_same_bits(tmp_path, kind, dtype):
    folder, file = folder_and_file(tmp_path, "llama3:micro", kind)
    model, original = load_model(file), load_model(folder)
    assert str(folder_dtype(file)) == str(model.dtype) == f"torch.{dtype}"
    convert(file, tmp_path / "converted")
    again, exact = load_model(tmp_path / "converted"), dict(load_model(file, "float32").named_parameters())
    assert again.config == model.config
    steps = {"Q8_0": 1 / 127, "Q4_0": 1 / 8, "BF16": 1 / 256}[kind]
    for (name, one), other, source in zip(model.named_parameters(), again.parameters(), original.parameters()):
        assert torch.equal(one, other) and torch.equal(one, exact[name].bfloat16()), name
        # Rounded to the nearest of equal steps, of which Q4_0 has one less above zero.
        assert (exact[name] - source).abs().max() <= 1.1 * steps * source.abs().max(), name


def test_half_precision_has_no_dtype_of_its_own(tmp_path):
    _, file = folder_and_file(tmp_path, "qwen3:micro", "F16")
    with pytest.raises(UserError, match="most of its tensors are float16; give dtype bfloat16 or float32"):
        load_model(file)
    assert load_model(file, "float32").dtype == torch.float32


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A file with a byte-level vocabulary, as Qwen's, the folder with its tokenizer, and texts."""
    place = tmp_path_factory.mktemp("tokenizer")
    texts = ["def f(x):\n    return x + 1  # größer\n", "The year 2024's <|im_end|> naïve 漢字 test.\n\n"] * 20
    train_bpe(texts, 400).save(place)
    stored = json.loads((place / "tokenizer.json").read_text())["model"]
    tokens = [token for token, _ in sorted(stored["vocab"].items(), key=lambda entry: entry[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["merges"]]
    more = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.token_type": [3 if token == "<|endoftext|>" else 1 for token in tokens],
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    shape = replace(preset("qwen3:micro", len(tokens)), num_layers=1)
    save_model(build_model(shape, "float32", seed=0), place / "folder")
    (place / "files").mkdir()
    tensors = load_file(place / "folder" / "model.safetensors")
    write_model(place / "files" / "model.gguf", shape, tensors, "Q8_0", more)
    return place / "files" / "model.gguf", place, texts[:2]


def test_the_tokenizer_and_template_in_a_file_are_its_own(with_tokenizer):
    file, source, texts = with_tokenizer
    ours, theirs = load_tokenizer(file), load_tokenizer(source)
    assert ours.eos_id == theirs.eos_id
    for text in texts:
        ids = ours.encode(text)
        assert ours.decode(ids) == text and len(ids) < len(text.encode()), "merges are used"
    assert load_chat_template(file).render([{"role": "user", "content": "a b"}]) == "a b"


def test_a_tokenizer_next_to_the_file_comes_first(tmp_path, with_tokenizer):
    file = with_tokenizer[0]
    (tmp_path / "model.gguf").write_bytes(file.read_bytes())
    train_bpe(["other"], 300).save(tmp_path)
    assert tokenizer_folder(tmp_path / "model.gguf") == tmp_path
    assert load_tokenizer(tmp_path / "model.gguf").vocab_size == load_tokenizer(tmp_path).vocab_size < 300


def test_without_transformers_the_message_says_what_to_do(tmp_path, monkeypatch, with_tokenizer):
    (tmp_path / "other.gguf").write_bytes(with_tokenizer[0].read_bytes())
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UserError, match=r"no tokenizer\.json next to it; put the model's there, or install transformers"
    ):
        load_tokenizer(tmp_path / "other.gguf")


def test_a_tokenizer_that_transformers_cannot_build_has_to_be_next_to_the_file(tmp_path):
    _, file = folder_and_file(tmp_path, "qwen3:micro")
    with pytest.raises(UserError, match=r"no tokenizer\.json; put the model's tokenizer next to its weights"):
        load_tokenizer(file)
    shape = replace(preset("qwen3:micro", 96), num_layers=2)
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    write_model(file, shape, tensors, more={"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(UserError, match=r"there is no tokenizer\.json next to it; put .* could not build it .*'rwkv'"):
        load_tokenizer(file)


def test_commands_take_a_file(tmp_path, capsys, with_tokenizer):
    file = with_tokenizer[0]
    assert main(["generate", "--model", str(file), "--prompt", "def f(", "--max-tokens", "3", "--seed", "1"]) == 0
    assert main(["convert", str(file), str(tmp_path / "out")]) == 0
    assert load_tokenizer(tmp_path / "out").vocabulary() == load_tokenizer(file).vocabulary()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "def f(", "completion": "x):"}) + "\n")
    run = ["--steps", "1", "--sequence-length", "64", "--tokens-per-step", "64", "--output", str(tmp_path / "run")]
    assert main(["sft", "--model", str(file), "--data", str(tmp_path / "rows.jsonl"), "--device", "cpu", *run]) == 0
    capsys.readouterr()


def test_the_digest_of_a_file_is_that_of_its_tensors_and_not_of_its_metadata(tmp_path):
    tensors = {"a": ("Q8_0", torch.ones(2, 32))}
    for name, architecture in (("one", "qwen3"), ("two", "llama")):
        write_gguf(tmp_path / f"{name}.gguf", {"general.architecture": architecture}, tensors)
    write_gguf(tmp_path / "three.gguf", {"general.architecture": "qwen3"}, {"a": ("Q8_0", 2 * torch.ones(2, 32))})
    one, two, three = (digest(tmp_path / f"{name}.gguf") for name in ("one", "two", "three"))
    assert one == two != three
