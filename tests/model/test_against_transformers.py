"""The same weights give the same logits in transformers, whichever of the two wrote the folder."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lockstep import build_model, load_model, ops, save_model
from lockstep.model import ModelConfig, RopeScaling

# Both sides sum in float32, in different orders, through two layers to logits of order 1.
TOLERANCE = 1e-4
LLAMA_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _our_logits(model, tokens):
    hidden = model(tokens, torch.arange(len(tokens)), ops.PackedAttention([len(tokens)]))
    return model.logits(hidden)


def _tokens(vocab_size):
    return torch.randint(vocab_size, (90,), generator=torch.Generator().manual_seed(1))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["llama", "llama-scaled", "llama-yarn", "qwen3"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_folder_of_transformers_gives_its_logits(tmp_path, family, heads, kv_heads, head_dim, tied):
    sizes = dict(
        vocab_size=301,
        hidden_size=80,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    if family == "qwen3":
        theirs = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        rope = {"llama-scaled": LLAMA_SCALING, "llama-yarn": YARN}.get(family)
        rope = dict(rope or {"rope_type": "default", "rope_theta": 10000.0})
        theirs = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    tokens = _tokens(301)
    difference = (_our_logits(ours, tokens) - theirs(tokens[None]).logits[0]).abs().max()
    assert difference < TOLERANCE


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_transformers_loads_what_we_save(tmp_path, family, tied):
    config = ModelConfig(
        family=family,
        vocab_size=301,
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        tie_embeddings=tied,
        qk_norm=family == "qwen3",
        rope_theta=12345.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64) if family == "llama3" else None,
        norm_eps=1e-5,
        max_positions=512,
        eos_token_ids=(7,),
    )
    ours = build_model(config, dtype="float32", seed=3)
    save_model(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = _tokens(301)
    assert (_our_logits(ours, tokens) - theirs(tokens[None]).logits[0]).abs().max() < TOLERANCE
    assert load_model(tmp_path).config == config
    assert dataclasses.asdict(config)["eos_token_ids"] == (7,)
