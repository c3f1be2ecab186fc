"""Small games of text, which Gymnasium registers when this module is imported."""

import string

import gymnasium
from gymnasium.spaces import Discrete, Text

WORDS = string.ascii_letters + string.digits + " .,:!?'<>/"


class Guess(gymnasium.Env):
    """A number from 0 to 9 to guess: 1 for the right one, and a tenth less for each guess before."""

    action_space = Text(max_length=2, min_length=1, charset=string.digits)
    observation_space = Text(max_length=200, charset=WORDS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.guesses = int(self.np_random.integers(10)), 0
        return f"Guess my number, 0 to 9. This is game {self.np_random.integers(1000)}.", {}

    def step(self, action):
        guess = int(action)
        self.guesses += 1
        if guess == self.number:
            return "Right!", 1.1, True, False, {}
        return "larger" if guess < self.number else "smaller", -0.1, False, False, {}


class Pictures(Guess):
    """One whose observations are no text."""

    observation_space = Discrete(3)


gymnasium.register("Guess-v0", Guess, max_episode_steps=4)
gymnasium.register("Pictures-v0", Pictures)
