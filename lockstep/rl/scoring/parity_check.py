"""`lockstep parity`: a mixed load through the engine, with every log-probability compared with the trainer's path."""

from __future__ import annotations

import random

import torch

from lockstep.config import EngineConfig
from lockstep.generate import Engine, SamplingParams
from lockstep.model import Decoder, ModelConfig
from lockstep.rl.scoring.parity import Parity
from lockstep.train import score


def check_parity(model: Decoder, tokens: int = 4096, seed: int = 0) -> tuple[Parity, dict[str, int]]:
    """Samples at least `tokens` tokens under load and compares each log-probability's bits with `score`'s.

    The load mixes prompt lengths, samples per prompt, temperatures and cuts; a small token budget splits prompts into
    chunks, and a cache too small for all sequences makes the engine preempt and resume some. Returns the comparison and
    the engine's counts (preemptions, reused prompt tokens), which show that the load was mixed.
    """
    draw = random.Random(seed)
    longest = min(192, model.config.max_positions // 2)
    config = EngineConfig(max_tokens_per_step=96, max_sequences=48, cache_tokens=3 * longest)
    engine = Engine(model, config)
    parity = Parity()
    while parity.tokens_checked < tokens:
        prompts, params = mixed_load(draw, model.config, 12, longest)
        groups = engine.generate(prompts, params)
        for prompt, param, group in zip(prompts, params, groups):
            scores = score(model, [prompt + c.token_ids for c in group], param.temperature)
            for completion, trainer in zip(group, scores):
                parity.compare(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :].cpu())
                if parity.tokens_different and parity.sequence is None:
                    parity.sequence = [*prompt, *completion.token_ids], len(prompt)
    statistics = engine.statistics
    return parity, {"preemptions": statistics.preemptions, "reused prompt tokens": statistics.prompt_tokens_reused}


def mixed_load(
    draw: random.Random, shape: ModelConfig, requests: int, longest: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths, some with a shared prefix, with random temperatures, cuts and numbers of samples."""
    prompts, params = [], []
    shared = [draw.randrange(shape.vocab_size) for _ in range(longest // 2)]
    for _ in range(requests):
        length = draw.choice([1, 3, 17, min(40, longest), longest])
        prompt = [draw.randrange(shape.vocab_size) for _ in range(length)]
        prompts.append(shared + prompt[len(shared) :] if draw.random() < 0.25 else prompt)
        params.append(
            SamplingParams(
                max_tokens=draw.randint(1, longest // 2),
                temperature=draw.uniform(0.05, 3.0),
                top_k=draw.choice([0, 0, 20]),
                top_p=draw.choice([1.0, 0.9]),
                n=draw.choice([1, 1, 4]),
                seed=draw.randrange(2**31),
                ignore_eos=True,
            )
        )
    return prompts, params
