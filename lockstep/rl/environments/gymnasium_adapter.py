"""Gymnasium games whose observations and actions are text: `gymnasium:ID`, or `gymnasium:MODULE:ID`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import Chat, ConversationEnvironment, ConversationOver
from lockstep.rl.environments.protocol import Environment, Example

GAMES = {"train": range(1000), "validation": range(1_000_000, 1_000_100)}
"""Seeds for resetting games."""


class GymnasiumGame(ConversationEnvironment):
    """One game per conversation: the model sees the observation, and its reply without reasoning is the action.

    The reward is the sum of the game's rewards, even if the conversation ends before the game. `turns` is the game's
    `max_episode_steps`, or 8 by default. An action outside the game's action space is answered with a description of
    valid actions, and costs a turn.
    """

    game: ClassVar[str] = ""
    in_workers = True  # games are other people's code

    def __init__(self) -> None:
        super().__init__()
        game = self._new()
        try:
            spaces = _gymnasium().spaces
            for name, space in (("observations", game.observation_space), ("actions", game.action_space)):
                if not isinstance(space, spaces.Text):
                    raise UserError(
                        f"gymnasium:{self.game}: its {name} are {space}, not text; wrap it so that both are "
                        "gymnasium.spaces.Text, and register that"
                    )
            steps = game.spec.max_episode_steps if game.spec else None
        finally:
            game.close()
        self.turns = steps or type(self).turns  # type: ignore[misc]

    def examples(self, split: str) -> Iterator[Example]:
        game = self._new()
        try:
            for seed in GAMES[split]:
                observation, _ = game.reset(seed=seed)
                yield Example(str(observation), id=f"{self.game}:{seed}", metadata={"seed": seed})
        finally:
            game.close()

    async def converse(self, example: Example, chat: Chat) -> float:
        game, total = self._new(), 0.0
        try:
            observation, _ = game.reset(seed=example.metadata["seed"])
            done = False
            while not done:
                chat.add(str(observation))
                try:
                    reply = await chat.reply()
                except ConversationOver:
                    break
                action = reply.spoken.strip()
                if not game.action_space.contains(action):
                    observation = _refusal(game.action_space)
                    continue
                observation, reward, terminated, truncated, _ = game.step(action)
                total += float(reward)
                done = bool(terminated or truncated)
        finally:
            game.close()
        return total

    def _new(self) -> Any:
        gymnasium = _gymnasium()
        try:
            return gymnasium.make(self.game)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(
                f"gymnasium:{self.game}: cannot be created ({error}); give the ID of a registered game, or MODULE:ID "
                "for one that MODULE registers when it is imported"
            ) from error


def gymnasium_game(name: str) -> type[Environment]:
    """The class of a game, by its ID. Raises UserError if Gymnasium is not installed."""
    _gymnasium()
    return type("GymnasiumGame", (GymnasiumGame,), {"game": name, "__module__": __name__})


def _refusal(space: Any) -> str:
    """A description of valid actions."""
    characters = "".join(sorted(space.character_set))
    message = f"Error: an action has {space.min_length} to {space.max_length} characters"
    return message + (f" of these: {characters}" if len(characters) <= 100 else "")


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise UserError("gymnasium is not installed; pip install 'gymnasium>=1.0'") from error
    return gymnasium
