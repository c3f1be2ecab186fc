"""What tests of the engine share: a small shape, drawn requests, and what stands for CUDA's capture."""

import random
from dataclasses import replace

from lockstep import SamplingParams
from lockstep.model import ModelConfig
from lockstep.model.config import DeltaNet

SHAPE = ModelConfig(
    family="qwen3", vocab_size=60, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48,
    qk_norm="head", max_positions=600,
)  # fmt: skip

HYBRID = replace(
    SHAPE, num_layers=3, delta=DeltaNet(1, 2, 16, 16), delta_layers=(True, False, True), attention_gate=True
)


def drawn_load(seed, count, vocab, most_tokens, longest=90, **choices):
    """(prompts, their parameters): prompts of up to `longest` tokens, of which some begin alike; `choices` of values by
    a parameter's name."""
    draw = random.Random(seed)
    common = [draw.randrange(vocab) for _ in range(40)]
    prompts = [
        (common[: draw.choice([0, 20, 40])] + [draw.randrange(vocab)] * draw.randint(1, 50))[-longest:]
        for _ in range(count)
    ]
    choices = {
        "temperature": [0.0, 0.7, 1.0],
        "top_k": [0, 0, 0, 5],
        "top_p": [1.0, 1.0, 0.8],
        "min_p": [0.0, 0.0, 0.05],
        "n": [1, 1, 3],
        "top_logprobs": [0, 0, 2],
    } | choices
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, most_tokens),
            seed=draw.randrange(1000),
            **{name: draw.choice(values) for name, values in choices.items()},
        )
        for _ in prompts
    ]
    return prompts, params


def finish(engine):
    """Computes all that was asked of the engine; returns the events."""
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def all_pages_are_free(engine):
    """And all states."""
    states, free = engine.scheduler.states, engine.allocator.num_free == engine.allocator.num_pages
    states.end_step()
    return free and not any(states.allocator.ref_counts) and not engine.has_work


class Recorder:
    """Captures as CUDA does, as far as results can tell: a replay writes the tensors that the first run made."""

    def __init__(self):
        self.captured = 0
        self.replayed = 0

    def __call__(self, function):
        self.captured += 1
        results = function()

        def replay():
            self.replayed += 1
            for result, new in zip(results, function(), strict=True):
                result.copy_(new)
            return results

        return replay
