"""How many steps a run over examples takes, and how much data that is."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lockstep.config import SFTConfig
from lockstep.data import RowLoader
from lockstep.errors import UserError
from lockstep.observe import announce, in_short
from lockstep.parallel import World

Config = TypeVar("Config", bound=SFTConfig)


def with_steps(config: Config, loader: RowLoader, world: World, examples: str) -> Config:
    """`config` with as many `steps` as its `epochs` take, unless it has steps; announces how much data they are.

    examples: what the data consists of, in the plural. Raises UserError for epochs of a stream.
    """
    size = loader.rows.size
    if size is None:
        if not config.steps:
            raise UserError(
                f"{config.data}: the length of a stream is unknown, so epochs cannot be counted; give --steps"
            )
        return config
    if not config.steps:
        config = replace(config, steps=loader.steps_of(config.epochs))
    if world.is_main:
        epochs, (count, tokens) = loader.epochs_of(config.steps), size
        announce(
            f"data: {count:,} {examples} of {in_short(tokens)} tokens; {config.steps:,} "
            f"step{'s' * (config.steps != 1)} of up to {in_short(config.tokens_per_step)} tokens "
            f"{'is' if config.steps == 1 else 'are'} {epochs:.3g} epoch{'s' * (epochs != 1)}"
        )
    return config
