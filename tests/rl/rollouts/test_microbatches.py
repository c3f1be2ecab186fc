"""Micro-batches: few, in an order that rollouts alone decide, and no completion's bits are touched by its company."""

import math
import random
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.spread import rollouts as sampled_lengths
from benchmarks.spread import spread_over
from lockstep import build_model
from lockstep.config import CompileConfig, RLConfig, TrainConfig
from lockstep.model import ModelConfig
from lockstep.parallel import World, apply_compile
from lockstep.parallel.world import AXES
from lockstep.rl import Example
from lockstep.rl.rollouts.packing import microbatches, packing_metrics, packing_of
from lockstep.rl.rollouts.records import Rollout, Scores
from lockstep.rl.rollouts.shares import batches_of_rank, token_budget
from lockstep.train.packing import first_fit_decreasing, pack, pack_scored, predicting_states, target_log_probs
from tests.rl.losses import assign_values, batches_of, drawn_value_head, log_probs_of

SHAPE = ModelConfig(
    family="qwen3", vocab_size=61, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    intermediate_size=96, qk_norm="head",
)  # fmt: skip


def _rollouts(groups: list[tuple[int, list[int]]], seed: int = 0) -> list[Rollout]:
    """Groups of a prompt of so many tokens and completions of so many."""
    draw = random.Random(seed)
    made = []
    for group, (prompt, completions) in enumerate(groups):
        ids = draw.choices(range(61), k=prompt)
        for length in completions:
            tokens = draw.choices(range(61), k=length)
            old = [-draw.random() for _ in tokens]
            made.append(
                Rollout(Example("p"), group, ids, tokens, old, "stop", "", 0, scores=Scores(advantage=draw.random()))
            )
    return made


def _sharp(dtype):
    """A model far from uniform, so that sums cancel."""
    model = build_model(SHAPE, dtype=dtype, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


GROUPS = st.lists(
    st.tuples(st.integers(1, 90), st.lists(st.integers(1, 70), min_size=1, max_size=6)), min_size=1, max_size=5
)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 300), max_size=40), budget=st.integers(1, 400))
def test_first_fit_decreasing_keeps_to_the_budget_and_to_few_bins(sizes, budget):
    bins = first_fit_decreasing(sizes, budget)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    totals = [sum(sizes[item] for item in items) for items in bins]
    assert all(total <= budget or len(items) == 1 for total, items in zip(totals, bins))
    assert all(items == sorted(items) for items in bins) and bins == sorted(bins)
    # No two bins could be one.
    assert all(first + second > budget for n, first in enumerate(totals) for second in totals[n + 1 :])


@settings(max_examples=30)
@given(groups=GROUPS, budget=st.integers(20, 500))
def test_every_rollout_is_trained_on_once_and_within_the_budget(groups, budget):
    rollouts = _rollouts(groups)
    batches = microbatches(rollouts, budget)
    assert sorted(number for batch in batches for number in batch.numbers) == list(range(len(rollouts)))
    for batch in batches:
        assert batch.numbers == sorted(batch.numbers)
        assert all(rollouts[number] is rollout for number, rollout in zip(batch.numbers, batch.rollouts))
        assert batch.rows <= budget or len(batch.rollouts) == 1
        row = batch.packed("cpu")
        assert batch.rows == sum(row.lengths) - sum(batch.left_out) and 0 <= len(row.tokens) - batch.rows < 8
    assert len(microbatches(rollouts, 10**6)) == 1


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("backend", ["none", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_completions_log_probabilities_have_the_bits_of_it_alone(dtype, backend):
    model = _sharp(dtype)
    apply_compile(model, CompileConfig(backend))
    rollouts = _rollouts([(40, [30, 5, 64]), (1, [9, 9]), (70, [20]), (130, [33, 64, 90]), (2, [3, 3, 3])])
    for budget in (10**6, 250, 90):
        config = RLConfig(model="m", train=TrainConfig(tokens_per_microbatch=budget))
        batches = batches_of(rollouts, config)
        shared = packing_metrics(batches, packing_of(config))["rollout/prompt_tokens_shared"]
        assert shared > 0.05
        for batch in batches:
            with torch.set_grad_enabled(budget != 250):
                together = target_log_probs(model, batch.row, 0.8)[0].detach()
            lengths = [len(r.token_ids) for r in batch.rollouts]
            for rollout, own in zip(batch.rollouts, together.split(lengths)):
                prompt = len(rollout.prompt_ids)
                with torch.no_grad():
                    alone = target_log_probs(model, pack([rollout.prompt_ids + rollout.token_ids], [prompt]), 0.8)[0]
                assert torch.equal(own, alone)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@settings(max_examples=6)
@given(groups=GROUPS, budget=st.integers(20, 500), seed=st.integers(0, 99), masked=st.booleans())
def test_scores_and_values_are_those_of_each_rollout_whole_and_by_itself(dtype, groups, budget, seed, masked):
    model, config = _sharp(dtype), RLConfig(model="m", algorithm="ppo", temperature=0.8)
    config = replace(config, train=TrainConfig(tokens_per_microbatch=budget))
    value_head = drawn_value_head(config, model, seed)
    rollouts = _rollouts(groups, seed)
    draw = random.Random(seed)
    if masked:
        rollouts = [replace(r, sampled=[draw.random() < 0.7 for _ in r.token_ids]) for r in rollouts]
    scores = log_probs_of(model, rollouts, config)
    assign_values(rollouts, model, value_head, config)
    for rollout, own in zip(rollouts, scores):
        row = pack_scored([rollout.prompt_ids + rollout.token_ids], [rollout.targets()])
        with torch.no_grad():
            alone = target_log_probs(model, row, 0.8)[0], value_head(predicting_states(model, row))
        assert torch.equal(torch.tensor(own), alone[0]) and torch.equal(torch.tensor(rollout.scores.values), alone[1])


def test_scores_compute_a_groups_prompt_once():
    model, rollouts = _sharp("float32"), _rollouts([(40, [10] * 8)])
    rows = []
    model.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    log_probs_of(model, rollouts, RLConfig(model="m"))
    assert rows == [39 + 8 * 10 + 1]  # filled up to a multiple of 8


def test_metrics_say_what_is_computed():
    rollouts = _rollouts([(10, [5, 7]), (4, [6, 6])])
    (batch,) = batches_of(rollouts, RLConfig(model="m"))
    # 9 + 5 + 7 and 3 + 6 + 6 rows, filled up to a multiple of 8.
    assert packing_metrics([batch], packing_of(RLConfig(model="m"))) == {
        "rollout/microbatches": 1, "rollout/padding": 1 - 36 / 40, "rollout/prompt_tokens_shared": 12 / 28,
    }  # fmt: skip


def _world(ranks, rank=0):
    class Of(World):
        data_rank = rank

    return Of(torch.device("cpu"), dict.fromkeys(AXES, 1) | {"data_shard": ranks})


def test_rows_count_as_the_rollouts_tokens_however_they_are_cut_and_shared_and_those_of_idle_ranks_for_nothing():
    rollouts = _rollouts([(10, [5, 7, 3, 9]), (4, [6, 6])])
    tokens = sum(len(r.prompt_ids) + len(r.token_ids) - 1 for r in rollouts)  # the last one predicts nothing
    for budget in (1, 25, 40, 1000):
        batches = batches_of(rollouts, RLConfig(model="m"), budget=budget)
        assert sum(int(batch.row.counts.sum()) for batch in batches) == tokens
    (idle,) = batches_of_rank(batches, packing_of(RLConfig()), _world(4, rank=3), build_model(SHAPE, "float32"))
    assert idle.idle and not idle.row.counts.any() and len(idle.row.counts) == len(idle.row.tokens)


@pytest.mark.parametrize(
    ("ranks", "busiest", "waits"),
    [
        pytest.param(2, 1.03, 1.05, marks=pytest.mark.slow),
        (4, 1.1, 1.12),
        pytest.param(8, 1.12, 1.15, marks=pytest.mark.slow),
    ],
)
def test_ranks_have_as_much_to_compute_in_all_and_in_every_turn(ranks, busiest, waits):
    # Dealt in turn, 8 ranks wait for the slowest 1.6 times as long as an even split takes.
    for seed in range(3):
        most, slowest, _ = spread_over(ranks, sampled_lengths(seed, longest=1024), by_cost=True)
        assert 1 <= most < busiest and most <= slowest < waits


@settings(max_examples=6)
@given(groups=GROUPS, ranks=st.integers(2, 5), seed=st.integers(0, 99))
def test_every_microbatch_is_computed_by_one_rank_and_all_have_as_many(groups, ranks, seed):
    rollouts, model = _rollouts(groups, seed), build_model(SHAPE, "float32")
    for deterministic in (False, True):
        train = TrainConfig(tokens_per_microbatch=100, deterministic_layout=deterministic)
        config = RLConfig(model="m", train=train)
        batches = batches_of(rollouts, config, budget=token_budget(rollouts, packing_of(config), _world(ranks)))
        shares = [batches_of_rank(batches, packing_of(config), _world(ranks, rank), model) for rank in range(ranks)]
        assert {len(share) for share in shares} == {math.ceil(len(batches) / ranks)}
        real = [[batch for batch in share if not batch.idle] for share in shares]
        assert sorted(id(b.rollouts) for own in real for b in own) == sorted(id(b.rollouts) for b in batches)
        turns = [batch for turn in zip_longest(*real) for batch in turn if batch is not None]
        if deterministic:
            # The order in which gradients are summed.
            assert [id(batch.rollouts) for batch in turns] == [id(batch.rollouts) for batch in batches]
            assert len(batches) == len(batches_of(rollouts, config))
        else:
            assert len(batches) <= math.ceil(len(batches_of(rollouts, config)) / ranks) * ranks
