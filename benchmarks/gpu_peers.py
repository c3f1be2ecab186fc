"""transformers on the same GPU: training and generation of a model of Qwen3-0.6B's shape, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_clock import Row, elapsed, row
from gpu_model import random_prompts

COUNT, LENGTH, BATCH, PROMPT, NEW = 8, 1024, 32, 256, 40


def measured() -> Iterator[Row]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model: Any = Qwen3ForCausalLM(shape).to("cuda", torch.bfloat16)
    tokens = torch.tensor(random_prompts(COUNT, LENGTH, shape.vocab_size), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    taken = elapsed(step, 3)
    yield row(
        f"transformers, training 0.6B, {COUNT} x {LENGTH}, moments in bfloat16", tokens.numel() / taken, "tokens/s"
    )
    prompts = torch.tensor(random_prompts(BATCH, PROMPT, shape.vocab_size), device="cuda")

    def generate(new: int) -> Callable[[], None]:
        options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0)
        return lambda: model.generate(prompts, **options)

    with torch.no_grad():
        taken = (elapsed(generate(NEW), 1) - elapsed(generate(1), 1)) / (NEW - 1)
    yield row(f"transformers, decode 0.6B, batch {BATCH}", BATCH / taken, "tokens/s")
    yield row(f"transformers, decode 0.6B, batch {BATCH}: a step", taken * 1e3, "ms")
