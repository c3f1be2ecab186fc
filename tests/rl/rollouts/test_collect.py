"""What is asked of the generator: the run's own sampling settings, with draws of the seed and the step."""

import pytest

from lockstep import Engine, EngineConfig, load_model
from lockstep.config import RLConfig
from lockstep.data import load_tokenizer
from lockstep.rl import Environment, Example
from lockstep.rl.conversations.rendering import Rendering
from tests.rl.collected import collected, held_out

EXAMPLES = [Example("stone:"), Example("river:")]


@pytest.fixture(scope="module")
def asked(model_folder):
    """`asked(step, …)` are the rollouts of a step, `asked(None, …)` those of a validation."""
    engine = Engine(load_model(model_folder), EngineConfig(max_sequences=8, cache_tokens=2048))
    engine.tokenizer = load_tokenizer(model_folder, engine.model.config.vocab_size)

    def ask(step, environment=None, version=0, **changes):
        config = RLConfig(**(dict(samples_per_prompt=4, max_new_tokens=8) | changes))
        given = EXAMPLES, environment or Environment(), engine, Rendering(engine.tokenizer), config
        engine.weights_changed(version)
        return held_out(*given) if step is None else collected(*given, step)

    return ask


def tokens_of(rollouts):
    return [rollout.token_ids for rollout in rollouts]


@pytest.mark.parametrize("step", [1, None])
def test_a_setting_that_leaves_the_likeliest_token_gives_the_same_tokens_to_every_seed(asked, step):
    assert tokens_of(asked(step, seed=0)) != tokens_of(asked(step, seed=1))
    for setting in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}, {"temperature": 0.01}):
        first, second = (tokens_of(asked(step, seed=seed, **setting)) for seed in (0, 1))
        assert first == second, setting


def test_a_completion_ends_after_a_stop_string_of_the_environment(asked):
    class Stopping(Environment):
        stop = tuple(rollout.completion[1] for rollout in asked(1, top_k=1))

    assert {rollout.finish_reason for rollout in asked(1, top_k=1)} == {"length"}
    assert {rollout.finish_reason for rollout in asked(1, Stopping(), top_k=1)} == {"stop"}


def test_draws_are_those_of_the_step_and_a_validations_are_always_the_same(asked):
    first, second, validation = (tokens_of(asked(step)) for step in (1, 2, None))
    assert len({str(tokens) for tokens in first + second}) == 16
    assert [tokens_of(asked(step, version=3)) for step in (1, 2, None)] == [first, second, validation]
