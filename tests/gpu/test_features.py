"""What trainer and engine do beyond plain steps, on a real GPU. Run: make gpu-test PYTHON=python3."""

import dataclasses

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, score
from lockstep.config import CompileConfig, RecomputeConfig, TrainConfig
from lockstep.generate.graphs import GraphRunner
from lockstep.model import preset
from lockstep.model.lora import lora_of
from lockstep.parallel.compile import apply_compile
from lockstep.parallel.recompute import apply_recompute
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import Trainer, pack, target_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = ["float32", "bfloat16"]
SEQUENCES = [[(3 * i + j) % 50 for j in range(40 + 30 * i)] for i in range(4)]


def _model(dtype: str, family: str = "qwen3", **changes):
    shape = dataclasses.replace(preset(f"{family}:micro", 1000), num_layers=3, **changes)
    return build_model(shape, dtype, device="cuda", seed=2)


def _step(trainer: Trainer) -> dict[str, float]:
    return trainer.step([pack(SEQUENCES, device="cuda")], lambda m, row: -target_log_probs(m, row)[0].mean())


def _trained(dtype: str, steps: int = 3, recompute: str = "none", **settings):
    model = _model(dtype)
    apply_recompute(model, RecomputeConfig(mode=recompute))  # type: ignore[arg-type]
    trainer = Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", **settings), 10)
    return [_step(trainer) for _ in range(steps)], model


def _assert_same_weights(model, other):
    differing = [n for (n, p), q in zip(model.named_parameters(), other.parameters()) if not torch.equal(p, q)]
    assert not differing


@pytest.mark.parametrize("family", ["llama3", "gpt_oss", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_trainer_and_generator_agree_under_a_mixed_load_with_preemptions(dtype, family):
    parity, load = check_parity(_model(dtype, family), tokens=1500)
    assert parity.tokens_different == 0 and parity.tokens_checked >= 1500
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


@pytest.mark.parametrize("chunks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_chunks_agree_too(dtype, chunks):
    parity, _ = check_parity(_model(dtype, reduction_chunks=chunks), tokens=600)
    assert parity.tokens_different == 0 and parity.tokens_checked >= 600


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("graphs", ["none", "full"])
def test_a_compiled_model_agrees_with_itself_and_follows_a_step(dtype, graphs):
    model = _model(dtype)
    apply_compile(model, CompileConfig(backend="inductor"))
    assert check_parity(model, tokens=600)[0].tokens_different == 0
    engine = Engine(model, EngineConfig(max_sequences=8, cache_tokens=2048, cuda_graphs=graphs))
    trainer = Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0), 3)
    for step in range(3):
        completion = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10, seed=step, ignore_eos=True))[0][0]
        expected = score(model, [[1, 2, 3, *completion.token_ids]])[0][2:]
        assert torch.equal(torch.tensor(completion.logprobs), expected.cpu())
        _step(trainer)
        engine.weights_changed(step + 1)


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
@pytest.mark.parametrize("settings", [{}, {"compiled": True}, {"recompute": "full"}, {"recompute": "selective"}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_steps_replayed_from_graphs_have_the_bits_of_direct_ones(dtype, settings, family):
    """Micro-batches of several sizes, all of them full: graphs then pad nothing, and the gradients' sums are equal."""
    rows = [[[(i * n) % 50 for i in range(n)] for n in lengths] for lengths in ((300, 84), (128,), (200, 100, 84))]
    results = []
    for graphs in ("auto", "none"):
        model = _model(dtype, family)
        apply_recompute(model, RecomputeConfig(mode=settings.get("recompute", "none")))
        if settings.get("compiled"):
            apply_compile(model, CompileConfig(backend="inductor"))
        trainer = Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0, cuda_graphs=graphs), 10)
        packed = [pack(row, device="cuda") for row in rows]
        steps = [trainer.step(packed, lambda m, row: -target_log_probs(m, row)[0].mean()) for _ in range(4)]
        results.append(([(step["loss"], step["grad_norm"]) for step in steps], model))
        assert trainer.recorded_sizes == (3 if graphs == "auto" else 0)
    assert results[0][0] == results[1][0]
    _assert_same_weights(results[0][1], results[1][1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("graphs", ["none", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_change_no_bit(dtype, graphs, temperature):
    model = _model(dtype)
    with torch.no_grad():  # sharper logits: a text that repeats itself, which n-grams draft
        model.embed_tokens.weight.mul_(8)
    prompts = [[5, 6, 7, 8] * 8, [9] * 30, list(range(20))]
    params = SamplingParams(max_tokens=60, temperature=temperature, n=2, seed=3, ignore_eos=True)
    sizes = EngineConfig(max_sequences=8, cache_tokens=4096, cuda_graphs=graphs)
    plain = Engine(model, dataclasses.replace(sizes, draft="none")).generate(prompts, params)
    engine = Engine(model, dataclasses.replace(sizes, draft="ngram"))
    drafted = engine.generate(prompts, params)
    assert engine.statistics.tokens_guessed > engine.statistics.guesses_accepted > 0
    for group, expected in zip(drafted, plain, strict=True):
        assert [(c.token_ids, c.logprobs) for c in group] == [(c.token_ids, c.logprobs) for c in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_agrees_and_alone_is_trained(dtype):
    shape = preset("qwen3:micro", 1000)
    model = build_model(
        dataclasses.replace(shape, lora=lora_of(shape, 4, 8.0, ["*_proj"])), dtype, device="cuda", seed=2
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, TrainConfig(learning_rate=1e-2, warmup_steps=0), 4)
    for _ in range(3):
        _step(trainer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora" in name), name
    parity, _ = check_parity(model, tokens=600)
    assert parity.tokens_different == 0


@pytest.mark.parametrize("settings", [{}, {"optimizer": "muon"}, {"optimizer_in_backward": True, "max_grad_norm": 0}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_have_the_same_bits_in_every_run_and_lower_the_loss(dtype, settings):
    (first, model), (second, other) = _trained(dtype, **settings), _trained(dtype, **settings)
    assert [m["loss"] for m in first] == [m["loss"] for m in second] and first[-1]["loss"] < first[0]["loss"]
    _assert_same_weights(model, other)


@pytest.mark.parametrize("mode", ["full", "every", "selective", "offload"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_activations_changes_no_bit(dtype, mode):
    (expected, model), (losses, other) = _trained(dtype), _trained(dtype, recompute=mode)
    assert [m["loss"] for m in losses] == [m["loss"] for m in expected]
    _assert_same_weights(model, other)


def test_an_engine_gives_its_weights_memory_away_and_takes_it_again():
    model = _model("bfloat16")
    engine = Engine(model, EngineConfig(cache_tokens=2048))
    assert isinstance(engine.runner, GraphRunner), "by default, on one GPU"
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    before = engine.generate([[1, 2, 3]], params)[0][0]
    engine.release_weights()
    with pytest.raises(RuntimeError, match="the engine's weights were released"):
        engine.generate([[1, 2, 3]], params)
    engine.weights_changed(1)
    assert engine.generate([[1, 2, 3]], params)[0][0].logprobs == before.logprobs
