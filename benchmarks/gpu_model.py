"""Whole models on the GPU: decoding, prefill and training against the hardware's limits, and the reference recipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import torch
from gpu_clock import Row, bandwidth, elapsed, peak, row

from lockstep import Engine, EngineConfig, SamplingParams, score
from lockstep.config import RLConfig, TrainConfig, algorithm_of
from lockstep.model import Decoder, ModelConfig, preset
from lockstep.rl import Example, Rollout, group_advantages
from lockstep.rl.rollouts.packing import packing_of, policy_batches
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.train import Trainer, pack, target_log_probs

PROMPTS, SAMPLES, NEW, STEPS, PROMPT_TOKENS = 5, 8, 100, 10, 64
RECIPE_SECONDS = 35
QWEN3_8B = dict(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=12288)


def random_model(config: ModelConfig) -> Decoder:
    """Fresh weights, drawn on the GPU: `build_model` draws on the CPU, the same in every place, and takes longer."""
    model = Decoder(config, torch.bfloat16, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02, generator=generator)
    return model


def compile_model(model: Decoder) -> None:
    """The library's own compilation of the blocks' halves."""
    from lockstep.config import CompileConfig
    from lockstep.parallel.compile import apply_compile

    apply_compile(model, CompileConfig(backend="inductor"))


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def decode() -> Iterator[Row]:
    """Tokens a second, and the share of the time that reading weights and keys once would take."""
    yield row("copy bandwidth", bandwidth() / 1e12, "TB/s")
    model = random_model(preset("qwen3:0.6b"))
    yield from decode_rates(model, "0.6B", "full", (1, 32, 256), at_least=0.6)
    yield from decode_rates(model, "0.6B", "none", (32,))
    del model
    large = ModelConfig(family="qwen3", vocab_size=151936, qk_norm="head", tie_embeddings=False, **QWEN3_8B)  # type: ignore[arg-type]
    yield from decode_rates(random_model(large), "8B", "full", (1, 32, 256), at_least=0.6)


def decode_rates(
    model: Decoder, name: str, graphs: str, batches: tuple[int, ...], at_least: float | None = None
) -> Iterator[Row]:
    config, steps, prompt = model.config, 40, 256
    for batch in batches:
        cache_tokens = batch * (prompt + steps + 64)
        engine = Engine(
            model,
            EngineConfig(
                max_tokens_per_step=8192,
                max_sequences=batch,
                cache_tokens=cache_tokens,
                cuda_graphs=graphs,  # type: ignore[arg-type]
            ),
        )
        params = SamplingParams(max_tokens=steps + 40, ignore_eos=True, seed=0)
        for tokens in random_prompts(batch, prompt, config.vocab_size):
            engine.add(tokens, params)
        while engine.statistics.tokens_sampled < 4 * batch:  # every prompt is computed, the graph recorded
            engine.step()
        torch.cuda.synchronize()
        began, sampled = time.perf_counter(), engine.statistics.tokens_sampled
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - began) / steps
        rate = (engine.statistics.tokens_sampled - sampled) / (taken * steps)
        weights = sum(p.nbytes for n, p in model.named_parameters() if config.tie_embeddings or "embed" not in n)
        keys = batch * (prompt + steps // 2) * config.num_layers * config.num_kv_heads * config.head_dim * 2 * 2
        limit = (weights + keys) / bandwidth()
        label = f"decode {name}, batch {batch}, graphs {graphs}"
        yield row(label, rate, "tokens/s")
        yield row(f"{label}: a step", taken * 1e3, "ms")
        yield row(f"{label}: share of the bandwidth limit", limit / taken, "", at_least=at_least)


def throughput() -> Iterator[Row]:
    """Prefill and training: floating-point operations against the measured product."""
    yield row("bfloat16 product 8192^3", peak() / 1e12, "TFLOP/s")
    model = random_model(preset("qwen3:0.6b"))
    config, count, length = model.config, 8, 1024
    sequences = random_prompts(count, length, config.vocab_size)
    tokens = count * length
    # A multiplication and an addition a weight; scores and sums over half the sequence on average.
    attention = 2 * 2 * length / 2 * config.num_layers * config.num_heads * config.head_dim
    forward = tokens * (2 * config.num_parameters + attention)

    def measured(kind: str, graphs: Literal["auto", "none"] = "auto") -> Iterator[Row]:
        taken = elapsed(lambda: score(model, sequences))
        yield row(f"prefill 0.6B {kind}, {count} x {length}", tokens / taken, "tokens/s")
        yield row(f"prefill 0.6B {kind}: share of the measured product", forward / taken / peak(), "")
        trainer = Trainer(model, TrainConfig(learning_rate=1e-6, cuda_graphs=graphs), 100)
        packed = pack(sequences, device="cuda")
        taken = elapsed(lambda: trainer.step([packed], lambda m, r: -target_log_probs(m, r)[0].mean()))
        yield row(f"training 0.6B {kind}, {count} x {length}", tokens / taken, "tokens/s")
        yield row(f"training 0.6B {kind}: share of the measured product", 3 * forward / taken / peak(), "")

    yield from measured("direct", "none")
    yield from measured("eager")
    model = random_model(preset("qwen3:0.6b"))
    try:
        compile_model(model)
    except ImportError as error:
        yield {"name": "prefill and training 0.6B compiled", "error": f"no compilation in this version: {error}"}
        return
    yield from measured("compiled")


def recipe(compiled: bool, graphs: str) -> Iterator[Row]:
    """Ten GRPO steps of 5 prompts x 8 completions x 100 tokens; the reward is the share of even tokens."""
    began = time.perf_counter()
    model = random_model(preset("qwen3:0.6b"))
    if compiled:
        compile_model(model)
    sizes = EngineConfig(
        max_tokens_per_step=4096,
        max_sequences=PROMPTS * SAMPLES,
        cache_tokens=PROMPTS * SAMPLES * 2 * (PROMPT_TOKENS + NEW),
        cuda_graphs=graphs,  # type: ignore[arg-type]
    )
    engine = Engine(model, sizes)
    config = RLConfig(train=TrainConfig(learning_rate=1e-6, schedule="constant", tokens_per_microbatch=8192))
    trainer = Trainer(model, config.train, STEPS)
    torch.cuda.synchronize()
    times = {"start-up": time.perf_counter() - began, "generator": 0.0, "trainer": 0.0, "sync": 0.0}
    checked = different = 0
    first = 0.0
    for step in range(STEPS):
        clock = time.perf_counter()
        prompts = random_prompts(PROMPTS * STEPS, PROMPT_TOKENS, model.config.vocab_size)[step::STEPS]
        params = SamplingParams(max_tokens=NEW, n=SAMPLES, ignore_eos=True, seed=step)
        groups = engine.generate(prompts, params)
        rollouts = [
            Rollout(Example(""), group, prompt, c.token_ids, c.logprobs, c.finish_reason, "", step)
            for group, (prompt, completions) in enumerate(zip(prompts, groups))
            for c in completions
        ]
        lap = time.perf_counter()
        times["generator"] += lap - clock
        for rollout in rollouts:
            rollout.scores.reward = sum(t % 2 == 0 for t in rollout.token_ids) / NEW
        advantages = group_advantages(
            torch.tensor([r.scores.reward for r in rollouts]).view(PROMPTS, SAMPLES)
        ).flatten()
        for rollout, advantage in zip(rollouts, advantages.tolist()):
            rollout.scores.advantage = advantage
        loss = PolicyLoss(algorithm_of(config), config.temperature, compare=True)
        trainer.step(policy_batches(rollouts, packing_of(config), device="cuda"), loss)
        checked += loss.parity.tokens_checked
        different += loss.parity.tokens_different
        torch.cuda.synchronize()
        trained = time.perf_counter()
        times["trainer"] += trained - lap
        engine.weights_changed(step + 1)
        times["sync"] += time.perf_counter() - trained
        first = first or time.perf_counter() - clock
    total = time.perf_counter() - began
    for name, taken in times.items():
        yield row(f"{STEPS} steps: {name}", taken, "s")
    yield row("first step: kernels are compiled in it", first, "s")
    yield row("a later step", (total - times["start-up"] - first) / (STEPS - 1), "s")
    yield row("whole recipe, imports apart", total, "s", at_most=RECIPE_SECONDS)
    yield row(
        "tokens compared between generator and trainer", checked, "tokens", at_least=STEPS * PROMPTS * SAMPLES * NEW
    )
    yield row("tokens that differ", different, "tokens", at_most=0)
