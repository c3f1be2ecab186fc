"""Games of Gymnasium, with the real package."""

import sys

import pytest

from lockstep.errors import UserError
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import converse

gymnasium = pytest.importorskip("gymnasium")
GUESS = "gymnasium:tests.rl.conversations.games:Guess-v0"


def play(environment, example):
    """The game by halving, as a good player would."""
    low, high = 0, 9

    def guess(messages):
        nonlocal low, high
        if messages[-1]["content"] == "larger":
            low = int(messages[-2]["content"].rpartition(">")[2]) + 1
        if messages[-1]["content"] == "smaller":
            high = int(messages[-2]["content"].rpartition(">")[2]) - 1
        return f"<think>{low} to {high}</think>{(low + high) // 2}"

    return converse(environment, example, *[guess] * environment.turns)


def test_games_are_played_to_their_end_and_again_alike():
    environment = load_environment(GUESS)
    examples = examples_of(environment, "train")
    assert environment.turns == 4 and len(examples) == 1000 and examples == examples_of(environment, "train")
    assert not {e.metadata["seed"] for e in examples} & {
        e.metadata["seed"] for e in examples_of(environment, "validation")
    }
    for example in examples[:10]:
        rewards, chat = play(environment, example)
        guesses = sum(m["role"] == "assistant" for m in chat.messages)
        assert chat.messages[0]["content"] == example.prompt
        # A sum of tenths, each of which is rounded; measured it is the same float.
        assert rewards == pytest.approx(1.1 - 0.1 * (guesses - 1), abs=1e-15)
        assert (rewards, chat.messages) == (play(environment, example)[0], play(environment, example)[1].messages)


def test_a_game_that_is_not_finished_has_what_it_has_earned():
    environment = load_environment(GUESS)
    example = examples_of(environment, "train")[0]
    assert converse(environment, example)[0] == 0.0
    rewards, chat = converse(environment, example, "11", "11")
    assert rewards == -0.2 and chat.messages[2]["content"] == "smaller"
    assert converse(environment, example, *["11"] * 9)[0] == -0.4, "the game ends at its own limit"


def test_an_action_that_the_game_does_not_know_is_answered():
    environment = load_environment(GUESS)
    for reply in ("five", "", "123", "-1", "<think>5", "5</think>"):
        rewards, chat = converse(environment, examples_of(environment, "train")[0], reply)
        assert rewards == 0.0
        assert chat.messages[-1]["content"] == "Error: an action has 1 to 2 characters of these: 0123456789"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gymnasium:Nothing-v0", "gymnasium:Nothing-v0: cannot be created"),
        ("gymnasium:CartPole-v1", r"its observations are Box.*, not text"),
        ("gymnasium:tests.rl.conversations.games:Pictures-v0", r"its observations are Discrete\(3\), not text"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_environment(name)


def test_without_gymnasium_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"pip install 'gymnasium>=1.0'"):
        load_environment("gymnasium:X-v0")
