"""An engine on several ranks: the tokens and the log-probabilities of one process, whatever is asked of it."""

import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch

from lockstep import Engine, SamplingParams, build_model, save_model, score
from lockstep.config import EngineConfig, ParallelConfig
from lockstep.errors import UserError
from lockstep.generate.drafts import FirstOf, HistoryDraft, NGramDraft
from lockstep.generate.driver import DriverEngine, follow
from lockstep.model import initialize, preset
from lockstep.parallel import close_world, generator_model, open_world
from lockstep.parallel import world as world_module
from tests.generate.engines import drawn_load
from tests.parallel.launch import launch
from tests.parallel.training import drawn


def model_of(ranks, chunks, name, dtype, vocab):
    parallel = ParallelConfig(tensor=ranks, reduction_chunks=chunks)
    world = open_world(parallel, "cpu")
    name, _, more = name.partition("+")
    shape = preset(name, vocab)
    if shape.latent is None:
        shape = replace(shape, num_heads=8, num_kv_heads=2, head_dim=16)
    fill = partial(initialize, seed=3)
    if more:
        shape, fill = replace(shape, qkv_bias=True, output_bias=True, sinks=True, windows=(20, 0, 5)), drawn
    return world, generator_model(shape, getattr(torch, dtype), world, parallel, fill)


def sample(ranks, chunks, name, dtype, vocab):
    """What an engine samples of a mixed load: prompts in chunks, shared prefixes, preemption, cuts, several samples."""
    world, model = model_of(ranks, chunks, name, dtype, vocab)
    # Without drafts, whose lengths follow the clock: how often pages are taken away and found again must not.
    config = EngineConfig(max_tokens_per_step=37, max_sequences=7, cache_tokens=128, draft="none")
    engine = Engine(model, config)
    shared, found = list(range(33)), []
    for seed in range(2):
        prompts, params = drawn_load(seed, 5, vocab, most_tokens=24, ignore_eos=[True])
        for prompt, param, group in zip(prompts, params, engine.generate(prompts, params)):
            found += group
            # The trainer's path shares the tokens between ranks, which the engine does not.
            scores = score(model, [prompt + c.token_ids for c in group], param.temperature or 1.0)
            for completion, trainer in zip(group, scores):
                assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :])
    tops = [event.top_logprobs for event in engine.stream(shared, SamplingParams(max_tokens=4, seed=1, top_logprobs=3))]
    assert engine.statistics.preemptions > 0 and engine.statistics.prompt_tokens_reused > 0
    close_world(world)
    return found, tops


@pytest.mark.parametrize(
    ("ranks", "chunks", "model", "dtype", "vocab"),
    [
        (2, 4, "llama3:micro", "bfloat16", 1031),
        (2, 2, "deepseek_v3:micro", "bfloat16", 258),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (2, 2, "qwen3:micro", "float32", 258),
                (4, 4, "qwen3:micro", "bfloat16", 259),
                (2, 2, "llama3:micro+sinks", "bfloat16", 258),
            ]
        ),
    ],
)
def test_ranks_sample_what_one_process_does(ranks, chunks, model, dtype, vocab):
    (alone,) = launch(1, sample, 1, chunks, model, dtype, vocab)
    assert len(alone[0]) > 10
    for rank in launch(ranks, sample, ranks, chunks, model, dtype, vocab):
        assert rank == alone


def drafted(ranks, draft):
    world, model = model_of(ranks, 2, "qwen3:micro", "bfloat16", 259)
    settings = EngineConfig(max_tokens_per_step=60, max_sequences=5, cache_tokens=256, draft=draft)
    own = FirstOf(HistoryDraft(), NGramDraft()) if draft == "auto" else None
    engine = Engine(model, settings, draft=own)
    params = SamplingParams(max_tokens=30, temperature=0.3, n=2, seed=5, ignore_eos=True)
    found = [engine.generate([[9, 10] * 8, [11, 12] * 5, [13] * 7], params) for _ in range(2)]
    drafts = engine.statistics.tokens_guessed, engine.statistics.guesses_accepted
    close_world(world)
    return found, drafts


def test_ranks_draft_alike_and_sample_what_one_process_does_without():
    ((alone, none),) = launch(1, drafted, 1, "none")
    (first, drafts), second = launch(2, drafted, 2, "auto")
    assert first == alone and none == (0, 0) and drafts[1] > 0
    assert second == (first, drafts)


def unseeded(ranks):
    world, model = model_of(ranks, ranks, "qwen3:micro", "float32", 258)
    engine, params = Engine(model), SamplingParams(max_tokens=20, n=2, ignore_eos=True)
    groups = [engine.generate([[1, 2, 3]], params)[0] for _ in range(2)]
    with pytest.raises(UserError, match="cuda_graphs do not work with parallel.tensor"):
        Engine(model, EngineConfig(cuda_graphs="full"))
    close_world(world)
    return [c.token_ids for group in groups for c in group]


def test_without_a_seed_ranks_agree_on_one():
    first, second = launch(2, unseeded, 2)
    assert first == second and len({tuple(tokens) for tokens in first}) == 4


def driven(ranks):
    """Rank 0's calls, each made on all ranks: completions at once, a stream that is left early, and new weights."""
    if ranks > 1:
        world_module.PATIENCE = timedelta(seconds=3)
    world, model = model_of(ranks, 2, "qwen3:micro", "float32", 258)
    found = None
    if world.is_main:
        engine = (DriverEngine if ranks > 1 else Engine)(model)
        time.sleep(5)  # nothing is asked of it, for longer than a message may take
        with pytest.raises(UserError, match="the prompt"):
            engine.add([999], SamplingParams())
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, top_k=5, stop_token_ids=(7, 8))
        found = [engine.generate([[1, 2], [3]], params)]
        stream = engine.stream([4, 5], params)
        found.append([next(stream).token_id for _ in range(3)])
        stream.close()
        engine.weights_changed(1)
        found.append(engine.generate([[6]], SamplingParams(max_tokens=4, seed=2, ignore_eos=True)))
        if ranks > 1:
            engine.end()
    else:
        follow(Engine(model))
    close_world(world)
    return found


@pytest.mark.slow
def test_ranks_that_follow_compute_what_rank_0_is_asked_for():
    assert launch(2, driven, 2, fresh=True) == [launch(1, driven, 1, fresh=True)[0], None]


def weights_that_one_rank_lacks(folders):
    world, model = model_of(2, 2, "qwen3:micro", "float32", 258)
    engine = Engine(model)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    said = []
    for missing in (0, 1):
        with pytest.raises(UserError) as error:
            engine.load_weights(folders[0] if world.rank == missing else folders[1])
        said.append(str(error.value))
        assert all(torch.equal(own, p.to_local()) for own, p in zip(before, model.parameters()))
    engine.load_weights(folders[1])
    assert not any(torch.equal(own, p.to_local()) for own, p in zip(before, model.parameters()) if own.ndim > 1)
    close_world(world)
    return said


def test_new_weights_come_to_all_ranks_or_to_none(tmp_path):
    shape = replace(preset("qwen3:micro", 258), num_heads=8, num_kv_heads=2, head_dim=16)
    save_model(build_model(shape, dtype="float32", seed=9), tmp_path / "whole")
    first, second = launch(2, weights_that_one_rank_lacks, [tmp_path / "nowhere", tmp_path / "whole"])
    assert first == second
    assert f"{tmp_path}/nowhere" in first[0] and first[1].startswith(f"rank 1: {tmp_path}/nowhere")
