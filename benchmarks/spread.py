"""How evenly a reinforcement step's micro-batches are spread over colocated ranks: dealt in turn, and by cost.

Counts multiplications and additions of qwen3:0.6b; nothing is trained. Run: python benchmarks/spread.py
"""

from __future__ import annotations

import random
from statistics import mean

import torch

from lockstep.config import ParallelConfig, RLConfig, TrainConfig
from lockstep.model import preset
from lockstep.parallel import World
from lockstep.parallel.world import AXES
from lockstep.rl import Example
from lockstep.rl.rollouts.packing import microbatches, packing_of
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.shares import cost, spread, token_budget

DRAWS = 20
SHAPE = preset("qwen3:0.6b", 151_936)
CONFIG = RLConfig(parallel=ParallelConfig(), train=TrainConfig(tokens_per_microbatch=8192))


def rollouts(seed: int, longest: int) -> list[Rollout]:
    """A step's: 16 prompts of 200 tokens, each with 8 completions of a log-normal length, 400 tokens in the median."""
    draw = random.Random(seed)
    return [
        Rollout(Example(""), group, [group] * 200, [1] * length, [0.0] * length, "stop", "", 0)
        for group in range(16)
        for length in [min(longest, 1 + int(draw.lognormvariate(6, 1))) for _ in range(8)]
    ]


def spread_over(ranks: int, sampled: list[Rollout], by_cost: bool) -> tuple[float, float, int]:
    """The busiest rank's cost, and that of the costliest micro-batch of every turn, over an even split; all cost."""
    world = World(torch.device("cpu"), dict.fromkeys(AXES, 1) | {"data_shard": ranks})
    budget = token_budget(sampled, packing_of(CONFIG), world) if by_cost else CONFIG.train.tokens_per_microbatch
    costs = [cost(plan.packed("cpu"), SHAPE) for plan in microbatches(sampled, budget)]
    shares = spread(costs, ranks) if by_cost else [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    of_ranks = [[costs[index] for index in share] for share in shares]
    even = sum(costs) / ranks
    slowest = [max(own[turn : turn + 1] or [0] for own in of_ranks)[0] for turn in range(max(map(len, of_ranks)))]
    return max(map(sum, of_ranks)) / even, sum(slowest) / even, sum(costs)


def main() -> None:
    print("| completions | ranks | micro-batches | busiest rank | slowest of every turn | cost |")
    print("| --- | --- | --- | --- | --- | --- |")
    for longest in (1024, 8192):
        for ranks in (2, 4, 8):
            steps = [rollouts(seed, longest) for seed in range(DRAWS)]
            in_turn, by_cost = ([spread_over(ranks, step, how) for step in steps] for how in (False, True))
            more = mean(new[2] / old[2] for new, old in zip(by_cost, in_turn))
            for how, found, cost_of_all in (("in turn", in_turn, 1.0), ("by cost", by_cost, more)):
                busiest, slowest, _ = zip(*found)
                figures = [f"{mean(values):.2f} (worst {max(values):.2f})" for values in (busiest, slowest)]
                print(f"| to {longest} | {ranks} | {how} | {' | '.join(figures)} | {cost_of_all:.3f} |", flush=True)


if __name__ == "__main__":
    main()
