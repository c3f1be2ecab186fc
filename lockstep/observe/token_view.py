"""Rollouts of chosen steps for the report, token by token, with the values that determine each token's color."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lockstep.config import CONFIG
from lockstep.errors import UserError
from lockstep.observe.readable import readable_rollouts

GROUPS = 4
"""Groups shown per step, with two completions of each: the best and the worst."""
LONGEST = 40
"""Maximum number of characters shown of a token."""
FULL_STRENGTH_NATS = 4.0
"""Log-probability, entropy or difference, in nats, at which the color is at full strength."""
LEFT_OUT = "left out"
ENVIRONMENTS = "written by the environment"


@dataclass(frozen=True)
class Piece:
    """A token: its text, the strengths of its colors as CSS variables, and its values as text."""

    text: str
    style: str
    figures: str


@dataclass(frozen=True)
class Shown:
    """A rollout, with its tokens if they are known."""

    rollout: dict[str, Any]
    pieces: list[Piece]


@dataclass(frozen=True)
class ShownStep:
    step: int
    rollouts: list[Shown]


def shown_steps(run: Path, steps: Sequence[int] = (), most_tokens: int = 12_000) -> list[ShownStep]:
    """Some rollouts of each of `steps`, by default the first, a middle and the last one; `most_tokens` tokens in all.

    Raises UserError for a step without rollouts.
    """
    paths = [path for path in sorted(run.glob("rollouts/step_*.jsonl")) if path.stem[5:].isdecimal()]
    files = {int(path.stem[5:]): path for path in paths}
    if missing := [step for step in steps if step not in files]:
        raise UserError(f"{run}: has no rollouts of step {missing[0]}; it has rollouts of {len(files)} steps")
    chosen = {step: _chosen(files[step]) for step in steps or _first_middle_last(list(files))}
    count = sum(map(len, chosen.values()))
    name_of = _names(run)
    longest = most_tokens // max(count, 1)
    largest = max((abs(a) for rollouts in chosen.values() for r in rollouts for a in _advantages(r)), default=0.0)
    return [
        ShownStep(step, [Shown(rollout, _pieces(rollout, name_of, longest, largest)) for rollout in rollouts])
        for step, rollouts in chosen.items()
    ]


def channels(steps: Sequence[ShownStep]) -> dict[str, str]:
    """The values that tokens can be colored by, by the letter of their CSS variable: those that any rollout has."""
    known = {name for step in steps for shown in step.rollouts if shown.pieces for name in shown.rollout}
    return {letter: title for letter, (title, field) in CHANNELS.items() if field in known}


CHANNELS = {
    "l": ("log-probability", "log_probs"),
    "a": ("advantage", "advantage"),
    "e": ("entropy", "entropies"),
    "d": ("trainer minus generator", "log_probs"),
    "r": ("reference minus policy", "reference_log_probs"),
    "t": ("teacher minus policy", "teacher_log_probs"),
}
"""For each way to color tokens, its title and the key in a rollout."""


def _first_middle_last(steps: list[int]) -> list[int]:
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


def _chosen(path: Path) -> list[dict[str, Any]]:
    """The best and the worst completion of some groups, preferring groups whose advantages differ."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for rollout in readable_rollouts(path):
        groups.setdefault(rollout["group"], []).append(rollout)
    ordered = sorted(groups.values(), key=lambda group: not any(rollout["advantage"] for rollout in group))
    chosen = []
    for group in ordered[:GROUPS]:
        ranked = sorted(group, key=lambda rollout: -rollout["advantage"])
        chosen += [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked
    return chosen


def _names(run: Path) -> Any:
    """A function from tokens to their texts; None if the run's tokenizer cannot be loaded."""
    # Imported here, since a report of pretraining does not need lockstep.data.
    from lockstep.data import load_tokenizer
    from lockstep.data.decoding import token_pieces

    folders = sorted(run.glob("checkpoints/step_*[0-9]"), reverse=True)[:1]
    if (run / CONFIG).is_file():
        with suppress(OSError, ValueError, RecursionError):  # of settings that cannot be read
            folders.append(Path(str(tomllib.loads((run / CONFIG).read_text()).get("model", ""))))
    for folder in folders:
        try:
            tokenizer = load_tokenizer(folder)
        except (UserError, OSError):
            continue
        return lambda tokens: token_pieces(tokenizer, tokens)
    return None


def _pieces(rollout: dict[str, Any], name_of: Any, longest: int, largest: float) -> list[Piece]:
    """The first and the last tokens of a rollout, `longest` in all."""
    tokens = rollout.get("token_ids") or []
    sampled = rollout.get("sampled") or [1] * len(tokens)
    if name_of is None or not tokens or longest < 2 or len(rollout.get("log_probs", ())) != sum(sampled):
        return []
    numbers = list(accumulate(sampled, initial=0))  # for each token, how many sampled ones precede it
    positions: list[int | None] = list(range(len(tokens)))
    if len(positions) > longest:
        positions = [*positions[: longest // 2], None, *positions[len(positions) - longest // 2 :]]
    texts = dict(zip((p for p in positions if p is not None), name_of([tokens[p] for p in positions if p is not None])))
    advantages = _advantages(rollout)
    pieces = []
    for position in positions:
        if position is None:
            pieces.append(Piece(f" [{len(tokens) - 2 * (longest // 2)} tokens {LEFT_OUT}] ", "", LEFT_OUT))
            continue
        if not sampled[position]:
            pieces.append(Piece(_visible(texts[position]), "", ENVIRONMENTS))
            continue
        values = _values(rollout, numbers[position], advantages)
        figures = " · ".join(f"{CHANNELS[letter][0]} {value:.4g}" for letter, value in values.items())
        pieces.append(Piece(_visible(texts[position]), _style(values, largest), figures))
    return pieces


def _advantages(rollout: dict[str, Any]) -> list[float]:
    return rollout.get("token_advantages") or [rollout["advantage"]] * len(rollout.get("log_probs", ()))


def _values(rollout: dict[str, Any], number: int, advantages: Sequence[float]) -> dict[str, float]:
    """The values of a sampled token, by the letters of `CHANNELS`, without those that the rollout does not have."""
    log_prob = rollout["log_probs"][number]
    values = {
        "l": log_prob,
        "a": advantages[number],
        "d": rollout.get("trainer_log_probs", rollout["log_probs"])[number] - log_prob,
    }
    for letter in "ert":
        if rollout.get(name := CHANNELS[letter][1]):
            values[letter] = rollout[name][number] - (0 if letter == "e" else log_prob)
    return values


def _style(values: dict[str, float], largest: float) -> str:
    """`--l` and `--e` from 0 to 1; the others like `--a` if positive and `--an` if negative."""
    parts = []
    for letter, value in values.items():
        # Any difference between trainer and generator is an error.
        scale = {"a": largest, "d": abs(value)}.get(letter, FULL_STRENGTH_NATS)
        strength = min(1.0, abs(value) / scale) if scale else 0.0
        if strength >= 0.005:
            parts.append(f"--{letter}{'n' if value < 0 and letter in 'adrt' else ''}:{strength:.2g}")
    return ";".join(parts)


def _visible(text: str) -> str:
    """A token's text, with its line breaks marked."""
    text = text if len(text) <= LONGEST else text[:LONGEST] + "…"
    return visible(text).replace("\n", "⏎\n")


def visible(text: str) -> str:
    """Replaces unprintable characters, except line breaks and tabs, by their codes."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
