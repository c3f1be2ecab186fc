"""Runs of a model so small that they take a fifth of a second, and tasks that it can learn something from."""

import json
import string

import torch

from lockstep.config import CheckpointConfig, EngineConfig, RLConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.model import ModelConfig, build_model, save_model
from lockstep.rl import Environment, Example

VOWELS = """
import lockstep.rl as rl

class Vowels(rl.Environment):
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple"):
            yield rl.Example(prompt=f"{word}:", answer="e")
    def reward(self, example, completion):
        return completion.count("e") / max(1, len(completion))
"""


class EvenBytes(Environment):
    """The share of bytes with an even number; prompts that begin with `=` earn nothing, whatever is said."""

    words = ("stone", "river", "cloud", "apple", "paper", "glass")

    def examples(self, split):
        for word in self.words if split == "train" else ("light", "music"):
            yield Example(prompt=f"{word}:")

    def reward(self, example, completion):
        if example.prompt.startswith("="):
            return 0.0
        return sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))


class Half(EvenBytes):
    words = tuple(f"{'=' * (n % 2)}{n}" for n in range(40))


class Hopeless(EvenBytes):
    words = ("=same",) * 8
    stop = tuple(string.ascii_letters)  # some completions end early


def write_model(path, seed=0, vocab=258):
    shape = ModelConfig(
        family="qwen3", vocab_size=vocab, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=48, qk_norm="head", max_positions=64,
    )  # fmt: skip
    model = build_model(shape, dtype="float32", seed=seed)
    with torch.no_grad():
        model.head_weight.mul_(1 + 7 * seed)  # the other one is sure of what it says
    save_model(model, path)
    ByteTokenizer().save(path)
    return path


def small_config(output, model, **changes):
    defaults = dict(
        output=str(output), model=str(model), steps=2, prompts_per_step=3, samples_per_prompt=4, max_new_tokens=5,
        validation_examples=2, dtype="float32",
        train=TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant", tokens_per_microbatch=64),
        engine=EngineConfig(max_sequences=16, cache_tokens=2048), checkpoint=CheckpointConfig(last_model_only=False),
    )  # fmt: skip
    return RLConfig(**(defaults | changes))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(run):
    """The metrics of the steps, without those of a validation before them."""
    return [metrics for metrics in lines_of(run / "metrics.jsonl") if "loss" in metrics]


def rollouts_of(run, step):
    return lines_of(run / f"rollouts/step_{step:08}.jsonl")


def trained_despite_failures(metrics, rollouts, on_failure, cause):
    """The rollouts of a step's groups with two rewards; that its metrics count them and the failures is checked."""
    failed = [rollout for rollout in rollouts if "failure" in rollout]
    assert metrics[f"reward/failed/{cause}"] == len(failed) >= 4 and metrics["parity/tokens_different"] == 0
    groups = [[r for r in rollouts if r["group"] == group] for group in range(int(metrics["groups/drawn"]))]
    left = [g for g in groups if on_failure == "zero" or sum("failure" not in r for r in g) >= 2]
    dropped = metrics.get("groups/dropped/failed_rewards", 0)
    assert (metrics["groups/trained"], dropped) == (len(left), len(groups) - len(left))
    return [r for group in left for r in group if on_failure == "zero" or "failure" not in r]
