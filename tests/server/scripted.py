"""A model that says the same thing to everybody: each token determines the next one."""

import dataclasses

import torch

from lockstep.data import load_tokenizer
from lockstep.model import build_model, preset, save_model
from tests.rl.conversations.families import write_family


def save_scripted(folder, tokenizer, script, eos_ids):
    """Writes weights to `folder` with which greedy sampling follows `script`, in which no token but the last recurs.

    Layers add nothing, so a token's logits depend on its embedding alone. The first token of `script` is the one that
    its prompts end with.
    """
    assert len(set(script[:-1])) == len(script) - 1
    config = preset("qwen3:micro", tokenizer.vocab_size + tokenizer.vocab_size % 2, tuple(eos_ids))
    config = dataclasses.replace(config, tie_embeddings=False, max_positions=512)
    model = build_model(config, dtype="float32", seed=1)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.embed_tokens.weight
        embedding.copy_(torch.nn.functional.normalize(torch.randn(embedding.shape, generator=torch.manual_seed(0))))
        model.lm_head.weight.zero_()
        for token, following in zip(script, script[1:]):
            model.lm_head.weight[following] += embedding[token]
    save_model(model, folder)


THOUGHT, SAID = "We add.", "now:4!"


def save_thinking(folder, bpe_tokenizer):
    """A model that answers everything with the same thought and words, in Qwen3's form; returns their tokens."""
    write_family(folder, "qwen3", bpe_tokenizer)
    tokenizer = load_tokenizer(folder)
    script = [*tokenizer.encode(f"\n<think>{THOUGHT}</think> {SAID}"), tokenizer.eos_id]
    save_scripted(folder, tokenizer, script, [tokenizer.eos_id])
    return script[1:]
