"""Which of a folder's tensors count, and in which dtype: as transformers decides, or refused by name."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lockstep import build_model, load_model, save_model, score
from lockstep.checkpoint.convert import convert
from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import (
    Decoder,
    begin_adapter,
    folder_dtype,
    load_weights,
    lora_of,
    preset,
    read_config,
    save_adapter,
)
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.train import Trainer
from tests.checkpoint.runs import checkpoints_of, update
from tests.model.test_families import change
from tests.parallel.launch import launch

TOKENS = [3, 1, 41, 59, 26, 53, 58, 97]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = "config.json says tie_word_embeddings, but lm_head.weight differs"


def tied(folder, family="qwen3:micro", dtype="float32"):
    """A folder with one matrix for embedding and head."""
    shape = replace(preset(family, 100), num_layers=2, tie_embeddings=True)
    save_model(build_model(shape, dtype=dtype, seed=0), folder)
    return folder


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_head(folder, dtype=torch.float32, **settings):
    """The same with a head of its own."""
    tied(folder, **settings)

    def add(tensors):
        draw = torch.Generator().manual_seed(1)
        tensors[HEAD] = (0.1 * torch.randn(tensors[EMBEDDING].shape, generator=draw)).to(dtype)

    edit(folder, add)
    return folder


def in_two_files(folder, listed=True):
    """The head in a file of its own, which the index lists or only names for another tensor."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + (name in (HEAD, 'model.norm.weight'))}.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file, metadata={"format": "pt"})
    places = {name: file for name, file in places.items() if listed or name != HEAD}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def theirs(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        log_probs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return log_probs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def ours(folder):
    return score(load_model(folder, dtype="float32"), [TOKENS])[0]


def assert_as_theirs(folder):
    torch.testing.assert_close(ours(folder), theirs(folder), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "place"), [("qwen3:micro", "one file"), ("gpt_oss:micro", "listed"), ("llama3:micro", "not listed")]
)
def test_a_head_of_its_own_counts_in_a_tied_folder_and_is_kept(tmp_path, caplog, family, place):
    folder = with_head(tmp_path / "one", family=family)
    if place != "one file":
        in_two_files(folder, place == "listed")
    assert_as_theirs(folder)
    assert caplog.text.count(TIED) == 1
    before = ours(folder)
    save_model(load_model(folder), tmp_path / "saved", max_shard_bytes=10**5)
    convert(folder, tmp_path / "converted")
    for kept in ("saved", "converted"):
        caplog.clear()
        assert json.loads((tmp_path / kept / "config.json").read_text())["tie_word_embeddings"] is False
        assert torch.equal(ours(tmp_path / kept), before) and TIED not in caplog.text
        assert_as_theirs(tmp_path / kept)


def test_a_copy_of_the_embedding_stays_tied_whatever_its_dtype_and_another_head_counts(tmp_path):
    tied(tmp_path, dtype="bfloat16")
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].float()}))
    assert read_config(tmp_path).tie_embeddings
    assert_as_theirs(tmp_path)
    with_head(tmp_path, torch.bfloat16)
    assert not read_config(tmp_path).tie_embeddings
    assert_as_theirs(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert read_config(tmp_path).tie_embeddings, "compared again when the file changes"


def test_an_embedding_that_is_stored_as_the_head_alone_is_both(tmp_path):
    tied(tmp_path / "one")
    edit(tmp_path / "one", lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert_as_theirs(tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two")
    assert torch.equal(ours(tmp_path / "one"), ours(tmp_path / "two"))
    change(tmp_path / "one", tie_word_embeddings=False)
    with pytest.raises(UserError, match=f"tensor {EMBEDDING} is missing"):
        load_model(tmp_path / "one")


def test_a_folder_with_a_single_file_and_an_index_is_read_from_the_single_file(tmp_path):
    tied(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    edit(tmp_path, lambda tensors: tensors[EMBEDDING].mul_(2))
    in_two_files(tmp_path)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_as_theirs(tmp_path)


def test_an_adapter_on_such_a_base_is_computed_and_merged_with_the_bases_head(tmp_path):
    base = with_head(tmp_path / "base")
    shape = read_config(base)
    model = Decoder(replace(shape, lora=lora_of(shape, 2, 4.0, ("*_proj",))), torch.float32)
    begin_adapter(model, base, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.02) if ".lora_B." in name else None
    save_adapter(model, tmp_path / "adapter", base)
    before = score(model, [TOKENS])[0]
    assert torch.equal(ours(tmp_path / "adapter"), before) and not torch.equal(ours(base), before)
    torch.testing.assert_close(before, theirs(tmp_path / "adapter"), atol=1e-4, rtol=0)
    convert(tmp_path / "adapter", tmp_path / "merged", merge=True)
    torch.testing.assert_close(ours(tmp_path / "merged"), before, atol=1e-4, rtol=0)
    assert_as_theirs(tmp_path / "merged")


def trained(folder, run, parallel):
    """A step of a run that starts from the folder, and its checkpoint."""
    world = open_world(parallel, "cpu")
    fill = partial(load_weights, path=folder)
    model = parallel_model(read_config(folder), torch.float32, world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-6, warmup_steps=0), 10, world)
    with checkpoints_of(run, trainer) as checkpoints:
        update(trainer)
        checkpoints.save(1, {})
    close_world(world)


@pytest.mark.parametrize(
    "ranks, parallel",
    [
        pytest.param(2, ParallelConfig(), marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(tensor=2), marks=pytest.mark.slow),
        (2, ParallelConfig(pipeline=2)),
    ],
    ids=["fsdp", "tensor", "pipeline"],
)
def test_every_layout_trains_and_saves_the_head(tmp_path, ranks, parallel):
    folder = with_head(tmp_path / "one")
    launch(ranks, trained, folder, tmp_path / "run", parallel)
    saved = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert_as_theirs(saved)
    before, after = (load_model(each, dtype="float32") for each in (folder, saved))
    for weight in ("embed_tokens", "lm_head"):
        one, two = (getattr(model, weight).weight for model in (before, after))
        assert 0 < (one - two).abs().max() < 1e-5, weight


def test_the_configurations_dtype_counts_and_not_that_of_any_tensor(tmp_path):
    tied(tmp_path)
    for dtype, older in (("bfloat16", None), (None, "bfloat16"), ("float32", "bfloat16")):
        change(tmp_path, dtype=dtype, torch_dtype=older)
        found = AutoConfig.from_pretrained(tmp_path).dtype
        assert load_model(tmp_path).dtype == load_model(tmp_path, dtype="auto").dtype == found
        assert found == (torch.float32 if dtype == "float32" else torch.bfloat16)
    change(tmp_path, dtype=None, torch_dtype=None, text_config={"dtype": "bfloat16"})
    assert folder_dtype(tmp_path) == torch.bfloat16


def test_without_one_the_dtype_is_that_of_most_bytes(tmp_path):
    tied(tmp_path / "one", dtype="bfloat16")
    change(tmp_path / "one", dtype=None, torch_dtype=None)
    # The first by name, and most of the tensors by number.
    edit(
        tmp_path / "one",
        lambda t: t.update({n: v.float() for n, v in t.items() if "norm" in n or "layers.0.self" in n}),
    )
    assert folder_dtype(tmp_path / "one") == torch.bfloat16
    convert(tmp_path / "one", tmp_path / "two")
    assert {tensor.dtype for tensor in load_file(tmp_path / "two" / "model.safetensors").values()} == {torch.bfloat16}
    edit(tmp_path / "one", lambda t: t.update({n: v.half() for n, v in t.items()}))
    with pytest.raises(UserError, match="most of its tensors are float16; give dtype bfloat16 or float32"):
        load_model(tmp_path / "one")
    assert load_model(tmp_path / "one", dtype="float32").dtype == torch.float32


@pytest.mark.parametrize(("family", "files"), [("qwen3:micro", 1), ("llama3:micro", 2)])
def test_tensors_saved_without_a_head_lack_a_prefix_and_are_read(tmp_path, family, files):
    tied(tmp_path / "whole", family)
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "one")
    assert "norm.weight" in load_file(tmp_path / "one" / "model.safetensors")
    assert load_model(tmp_path / "one").config == load_model(tmp_path / "whole").config
    expected = ours(tmp_path / "whole")
    if files == 2:
        in_two_files(tmp_path / "one")
    assert torch.equal(ours(tmp_path / "one"), expected)
    assert_as_theirs(tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two")
    assert torch.equal(ours(tmp_path / "two"), expected) and EMBEDDING in load_file(
        tmp_path / "two" / "model.safetensors"
    )


def test_tensors_that_are_left_out_are_named_once_except_old_rotary_buffers(tmp_path, caplog):
    tied(tmp_path / "one")
    edit(tmp_path / "one", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    load_model(tmp_path / "one")
    assert not caplog.text
    save_model(build_model(replace(preset("deepseek_v3:micro"), num_layers=2), dtype="float32"), tmp_path / "two")
    edit(tmp_path / "two", lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(16)}))
    load_model(tmp_path / "two")
    load_model(tmp_path / "two")
    assert caplog.text.count("not used by this model: tensor model.layers.4.eh_proj.weight") == 1


def test_an_index_that_lists_a_head_which_was_dropped_is_read_as_far_as_the_files_go(tmp_path):
    expected = ours(tied(tmp_path))
    in_two_files(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"][HEAD] = index["weight_map"][EMBEDDING]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(ours(tmp_path), expected)
