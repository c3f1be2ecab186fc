"""Routes of a mixture of experts: compared in a whole run, what recording them costs, and what replaying them changes.

    run       digit sums: a micro mixture pretrained on a careless text, then GRPO; what differed in all steps
    cost      CPU seconds of decoding without routes, with digests and with whole routes, in turns; characters of each
    replay    samples of the model in bfloat16, scored in float32: routes that differ, and the ratio with and without

Run: python benchmarks/routes.py [--work run|cost|replay] [--steps 200] [--compile]
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import tempfile
import time
from pathlib import Path

import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.config import CompileConfig, RLConfig, TrainConfig, algorithm_of
from lockstep.generate.sampling_params import RoutesForm
from lockstep.model import preset
from lockstep.observe import read_metrics
from lockstep.recipes import digit_sum
from lockstep.recipes.demo import ERROR_RATE, LINES, demo_pretraining
from lockstep.rl import Example
from lockstep.rl.environments.digit_sum import pretraining_text
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.packing import packing_of, policy_batches
from lockstep.rl.rollouts.records import Rollout, Scores
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.train.pretrain import pretrain

SUMS = ("tokens_checked", "tokens_different", "routes_checked", "routes_different")
FORMS: tuple[RoutesForm, ...] = ("", "digest", "whole")
SEQUENCES, PROMPT, NEW, ROUNDS = 16, 32, 64, 5


def run(folder: Path, steps: int, first_steps: int, compiled: bool) -> None:
    """Both stages, and what differed in the second."""
    first = demo_pretraining(str(folder / "pretrain"), seed=0)
    first.model, first.steps = "qwen3_moe:micro", first_steps
    began = time.perf_counter()
    pretrain(first, list(pretraining_text(LINES, ERROR_RATE, 0)))
    start = folder / "pretrain" / "checkpoints" / f"step_{first_steps:08}"
    print(f"pretrained {first_steps} steps in {time.perf_counter() - began:.0f} s")
    second = digit_sum()
    second.model, second.output, second.steps = str(start), str(folder / "rl"), steps
    second.compile = CompileConfig(backend="inductor" if compiled else "none")
    began = time.perf_counter()
    metrics = read_metrics(reinforce(second) / "metrics.jsonl")
    trained = [m for m in metrics if "loss" in m]
    print(f"reinforced {len(trained)} steps in {time.perf_counter() - began:.0f} s")
    for name in SUMS:
        print(f"  {name:18} {sum(m[f'parity/{name}'] for m in trained):,}")
    accuracy = [m["validation/accuracy"] for m in metrics if "validation/accuracy" in m]
    print(f"  accuracy           {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    print(f"  largest ratio on a batch's first update {max(m['policy/ratio_first_max'] for m in trained)!r}")


def prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(SEQUENCES)]


def cost() -> None:
    """Decoding alone, the ways in turns; the median of each."""
    shape = preset("qwen3_moe:tiny")
    engine = Engine(build_model(shape, "float32", seed=0), EngineConfig(draft="none"))
    times: dict[RoutesForm, list[float]] = {form: [] for form in FORMS}
    lengths = {}
    for _ in range(ROUNDS + 1):
        for form in FORMS:
            began = time.process_time()
            params = SamplingParams(max_tokens=NEW, seed=0, ignore_eos=True, routes=form)
            groups = engine.generate(prompts(shape.vocab_size), params)
            times[form].append(time.process_time() - began)
            lengths[form] = len(groups[0][0].routes[0]) if form else 0
    print(f"qwen3_moe:tiny, {SEQUENCES} sequences of {NEW} tokens:")
    for form in FORMS:
        median = sorted(times[form][1:])[ROUNDS // 2]
        print(f"  {form or 'none':8} {median:.3f} CPU s, {lengths[form]} characters a token")


def replay() -> None:
    """Of one batch of rollouts of a fresh model: samples from bfloat16 arithmetic, trained in float32."""
    model = build_model(preset("qwen3_moe:tiny"), "float32", seed=0)
    other = copy.deepcopy(model).to(torch.bfloat16)
    vocab = model.config.vocab_size
    params = SamplingParams(max_tokens=NEW, seed=0, ignore_eos=True, routes="whole")
    groups = Engine(other, EngineConfig()).generate(prompts(vocab), params)
    rollouts = [
        Rollout(
            Example(""), i, prompt, c.token_ids, c.logprobs, "length", "", 0, routes=c.routes,
            scores=Scores(advantage=1.0),
        )
        for i, (prompt, group) in enumerate(zip(prompts(vocab), groups))
        for c in group
    ]  # fmt: skip
    config = RLConfig(dtype="float32", train=TrainConfig(tokens_per_microbatch=2048))
    print(f"sampled in bfloat16, trained in float32, {sum(r.num_sampled for r in rollouts)} tokens:")
    for replayed in (False, True):
        loss = PolicyLoss(algorithm_of(config), config.temperature, compare=True, replay_routes=replayed)
        for batch in policy_batches(rollouts, packing_of(config)):
            loss(model, batch)
        mean, square = (sum(loss.of_microbatches[f"policy/ratio_{name}"]) for name in ("mean", "square"))
        distance = math.sqrt(square - 2 * mean + 1)
        print(f"  {'with' if replayed else 'without'} replay: RMS distance of the ratio from 1: {distance:.5f}")
    print(f"  routes that differ: {loss.metrics()['routes/different']:.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", choices=["run", "cost", "replay"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--compile", action="store_true", help="the run's model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.work in (None, "run"):
            run(Path(name), options.steps, options.pretrain_steps, options.compile)
        if options.work in (None, "cost"):
            cost()
        if options.work in (None, "replay"):
            replay()


if __name__ == "__main__":
    main()
