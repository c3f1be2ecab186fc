"""What is asked of the generator: the run's own sampling settings, with draws of the seed and the step."""

import pytest

from lockstep import Engine, EngineConfig, load_model
from lockstep.config import RLConfig
from lockstep.data import load_tokenizer
from lockstep.rl import Environment, Example
from lockstep.rl.conversations.rendering import Rendering
from tests.rl.collected import collected, held_out

EXAMPLES = [Example("stone:"), Example("river:")]


class Vowels(Environment):
    def reward(self, example, completion):
        return float(completion.count("e"))


@pytest.fixture(scope="module")
def engine(model_folder):
    return Engine(load_model(model_folder), EngineConfig(max_sequences=8, cache_tokens=2048))


@pytest.fixture(scope="module")
def asked(engine, model_folder):
    """`asked(step, …)` are the rollouts of a step, `asked(None, …)` those of a validation."""
    engine.tokenizer = load_tokenizer(model_folder, engine.model.config.vocab_size)

    def ask(step, environment=None, **changes):
        config = RLConfig(**(dict(samples_per_prompt=4, max_new_tokens=8) | changes))
        given = EXAMPLES, environment or Vowels(), engine, Rendering(engine.tokenizer), config
        return held_out(*given) if step is None else collected(*given, step)

    return ask


def _tokens(rollouts):
    return [rollout.token_ids for rollout in rollouts]


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}, {"temperature": 0.01}], ids=str)
@pytest.mark.parametrize("step", [1, None])
def test_a_setting_that_leaves_the_likeliest_token_gives_the_same_tokens_to_every_seed(asked, step, setting):
    assert _tokens(asked(step, seed=0)) != _tokens(asked(step, seed=1))
    assert _tokens(asked(step, seed=0, **setting)) == _tokens(asked(step, seed=1, **setting))


def test_a_completion_ends_after_a_stop_string_of_the_environment(asked):
    class Stopping(Vowels):
        stop = tuple(rollout.completion[1] for rollout in asked(1, top_k=1))

    assert {rollout.finish_reason for rollout in asked(1, top_k=1)} == {"length"}
    assert {rollout.finish_reason for rollout in asked(1, Stopping(), top_k=1)} == {"stop"}


def test_draws_are_those_of_the_step_and_a_validations_are_always_the_same(asked, engine):
    first, second, validation = (_tokens(asked(step)) for step in (1, 2, None))
    assert len({str(tokens) for tokens in first + second}) == 16
    engine.weights_changed(3)
    assert [_tokens(asked(step)) for step in (1, 2, None)] == [first, second, validation]
