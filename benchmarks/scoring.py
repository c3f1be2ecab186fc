"""The reference's pass of an RL step, each prompt computed once per group, against every completion with its own.

Run: OMP_NUM_THREADS=1 python benchmarks/scoring.py

A Qwen3 of 6M parameters, embeddings included, scores 4 groups of 8 completions of 64 tokens. Seconds of one thread's
processor time, the two in turns, medians of 7; the bits of both are compared.
"""

from __future__ import annotations

import random
import statistics
import time

import torch

from lockstep import build_model
from lockstep.config import RLConfig
from lockstep.model import Decoder, preset
from lockstep.rl import Example, Rollout
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.scoring.reference import token_log_probs
from lockstep.train.packing import pack_scored, split_by_tokens, target_log_probs

GROUPS, GROUP, NEW, ROUNDS = 4, 8, 64, 7
CONFIG = RLConfig(model="m")


def drawn(prompt: int, vocabulary: int) -> list[Rollout]:
    """Groups of completions of random tokens."""
    draw, made = random.Random(0), []
    for group in range(GROUPS):
        prompt_ids = draw.choices(range(vocabulary), k=prompt)
        for _ in range(GROUP):
            tokens = draw.choices(range(vocabulary), k=NEW)
            made.append(Rollout(Example("p"), group, prompt_ids, tokens, [0.0] * NEW, "stop", "", 0))
    return made


@torch.no_grad()
def scored_whole(model: Decoder, rollouts: list[Rollout]) -> list[list[float]]:
    """Every completion with a prompt of its own."""
    scores: list[list[float]] = []
    sequences = [rollout.prompt_ids + rollout.token_ids for rollout in rollouts]
    for part in split_by_tokens([len(s) for s in sequences], CONFIG.train.tokens_per_microbatch):
        row = pack_scored(sequences[part], [rollout.targets() for rollout in rollouts[part]])
        scores += [own.tolist() for own in target_log_probs(model, row, CONFIG.temperature)[0].split(NEW)]
    return scores


def main() -> None:
    torch.set_num_threads(1)
    forward = ForwardPasses(CONFIG.train.tokens_per_microbatch)
    for dtype in ("float32", "bfloat16"):
        model = build_model(preset("qwen3:tiny", 2048), dtype=dtype)
        for prompt in (8, 256):
            rollouts = drawn(prompt, model.config.vocab_size)
            ways = [
                lambda rollouts=rollouts, model=model: scored_whole(model, rollouts),
                lambda rollouts=rollouts, model=model: token_log_probs(model, rollouts, CONFIG.temperature, forward),
            ]
            whole, shared = (way() for way in ways)
            assert whole == shared, "other bits"
            seconds: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for times, way in zip(seconds, ways):
                    began = time.process_time()
                    way()
                    times.append(time.process_time() - began)
            before, after = map(statistics.median, seconds)
            print(f"{dtype}, prompts of {prompt}: {before:.3f} s -> {after:.3f} s, {before / after:.2f}x", flush=True)


if __name__ == "__main__":
    main()
