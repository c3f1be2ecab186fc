"""Context parallelism against one process: the same bits forward, the same training, equal work."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.context import measure
from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig
from lockstep.model import initialize, preset, resolve_dtype
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.parallel.context import split_sequences
from lockstep.train import pack, target_log_probs
from lockstep.train.context import shard_row
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import launch
from tests.parallel.training import whole

VOCAB = 258
# Two rows of sequences of odd lengths. Of the second one sequence is long, and only its last token is a target: some
# rank has none.
LENGTHS = [[301, 5, 1, 130, 64, 77], [391]]


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=20), ranks=st.integers(1, 8))
def test_ranks_share_all_tokens_once_equally_many_and_with_equal_causal_work(lengths, ranks):
    shares = split_sequences(lengths, ranks)
    tokens = [sum(stop - start for _, start, stop in share) for share in shares]
    assert max(tokens) - min(tokens) <= 1 and sum(tokens) == sum(lengths)
    covered = sorted(piece for share in shares for piece in share)
    for sequence, length in enumerate(lengths):
        ends = [0, *(stop for s, _, stop in covered if s == sequence)]
        assert ends[-1] == length and ends[:-1] == [start for s, start, _ in covered if s == sequence]
    keys = [sum((start + 1 + stop) * (stop - start) // 2 for _, start, stop in share) for share in shares]
    # Of about length² / 2 · ranks keys a rank: chunks differ by some tokens where a length does not divide.
    assert max(keys) - min(keys) <= 4 * sum(lengths)


def first_step(parallel, dtype, model, recompute):
    """Log-probabilities of this rank's targets, in their rows' places and 0 elsewhere, and all gradients, whole."""
    world = open_world(parallel, "cpu")
    shape, fill = replace(preset(model, VOCAB), num_layers=2), partial(initialize, seed=3)
    recomputed = RecomputeConfig(mode=recompute)
    decoder = parallel_model(shape, resolve_dtype(dtype), world, parallel, CompileConfig(), fill, recomputed)
    draw = torch.Generator().manual_seed(0)
    log_probs = [torch.zeros(sum(lengths)) for lengths in LENGTHS]
    targets = sum(LENGTHS[0]) - len(LENGTHS[0]) + 1
    for index, lengths in enumerate(LENGTHS):
        sequences = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in lengths]
        row = shard_row(pack(sequences, None if index == 0 else [lengths[0] - 1]), world)
        if world.data_size == 2 and world.data_rank != index:
            continue
        with torch.no_grad():
            own = target_log_probs(decoder, row)[0]
        predictors = row.attention.rows[row.predictors] if world.degrees["context"] > 1 else row.predictors
        log_probs[index][predictors] = own
        NextTokenLoss(targets)(decoder, row).backward()
    grads = {name: whole(p.grad).float() for name, p in decoder.named_parameters()}
    close_world(world)
    return log_probs, grads


@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "recompute"),
    [
        pytest.param("qwen3:micro", "float32", 4, "none", marks=pytest.mark.slow),
        pytest.param("qwen3:micro", "bfloat16", 4, "full", marks=pytest.mark.slow),
        ("llama3:micro", "float32", 2, "selective"),
    ],
)
def test_a_step_has_the_bits_of_one_process_forward_and_its_gradients(model, dtype, ranks, recompute):
    ((expected, gradients),) = launch(1, first_step, ParallelConfig(), dtype, model, "none")
    returned = launch(ranks, first_step, ParallelConfig(context=2), dtype, model, recompute)
    for index, theirs in enumerate(expected):
        ours = torch.stack([log_probs[index] for log_probs, _ in returned])
        # Every target is one rank's alone: in all other places there is a zero.
        assert torch.equal((ours != 0).sum(0), (theirs != 0).long())
        assert torch.equal(ours.sum(0), theirs)
    # The tolerance. One process adds bfloat16 gradients up in bfloat16: 8 bits.
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    for _, grads in returned:
        for name, theirs in gradients.items():
            assert (grads[name] - theirs).norm() <= tolerance * theirs.norm(), name


@pytest.mark.slow
def test_64k_tokens_take_half_the_memory_and_half_the_attention_on_each_of_2_ranks():
    (alone,), shared = (measure(65536, ranks, "float32") for ranks in (1, 2))
    for rank in shared:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        # Beside its half of all that is kept for the gradient, a rank holds one layer's gathered keys and values.
        assert rank["peak_mib"] - rank["before_mib"] < 0.55 * (alone["peak_mib"] - alone["before_mib"])
        # Equal work up to some rows of a tile; the rest is the clock's noise.
        assert rank["attention_seconds"] < 0.6 * alone["attention_seconds"]
