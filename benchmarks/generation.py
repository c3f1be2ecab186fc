"""Sampling with log-probabilities against transformers' `generate`: the same weights, prompts and lengths.

5M-parameter Qwen3, bfloat16, 64 prompts of 64 tokens, 128 new tokens each. Run: python benchmarks/generation.py
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time

PROMPTS, LENGTH, NEW, VOCAB = 64, 64, 128, 2048


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(PROMPTS)]


def lockstep_seconds(folder: str) -> float:
    from lockstep import Engine, EngineConfig, SamplingParams, load_model

    engine = Engine(load_model(folder), EngineConfig(max_tokens_per_step=PROMPTS * LENGTH, prefix_cache=False))
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, seed=0)
    engine.generate(prompts()[:8], params)
    began = time.perf_counter()
    groups = engine.generate(prompts(), params)
    seconds = time.perf_counter() - began
    assert all(len(g[0].token_ids) == len(g[0].logprobs) == NEW for g in groups)
    return seconds


def transformers_seconds(folder: str) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    options = dict(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=0, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    tokens = torch.tensor(prompts())
    model.generate(tokens[:8], attention_mask=torch.ones_like(tokens[:8]), **options)
    began = time.perf_counter()
    result = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    logits = torch.stack(result.logits, 1).float().log_softmax(-1)
    logits.gather(-1, result.sequences[:, LENGTH:, None])
    seconds = time.perf_counter() - began
    assert result.sequences.shape == (PROMPTS, LENGTH + NEW)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side:
        print(lockstep_seconds(options.folder) if options.side == "lockstep" else transformers_seconds(options.folder))
        return
    from peers import compare

    from lockstep import build_model, save_model
    from lockstep.model import preset

    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model(preset("qwen3:tiny", VOCAB), dtype="bfloat16"), folder)
        work = f"generation: 5M Qwen3, bfloat16, {PROMPTS} x {LENGTH} tokens, {NEW} new"
        compare(__file__, ["--folder", folder], work, PROMPTS * NEW, "tokens/s", "transformers")


if __name__ == "__main__":
    main()
