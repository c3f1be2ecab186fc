"""Reads and checks the rollouts file of a step; errors name the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.generate.drafts import HistoryDraft
from lockstep.generate.routes import is_written
from lockstep.rl.environments.protocol import Example
from lockstep.rl.rollouts.records import Rollout


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that `write_rollouts` wrote. Raises UserError, naming the line, for anything else."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not texts:
        raise UserError(f"{path}: contains no rollouts")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text.decode())
            problem = _problem(line)
        except (ValueError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise UserError(f"{path}:{number}: is not a rollout of a run ({problem})")
        lines.append(line)
    return lines


def sampled_before(run: Path, most: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions of the run's newest steps, about `most` completion tokens, in the order of steps.

    Files that cannot be read are skipped: this is only for drafting.
    """
    samples: list[tuple[list[int], list[int]]] = []
    for path in sorted((run / "rollouts").glob("step_*.jsonl"), reverse=True):
        with suppress(UserError):
            samples = [(line["prompt_ids"], line["token_ids"]) for line in read_lines(path)] + samples
        if sum(len(completion) for _, completion in samples) >= most:
            break
    return samples


def recall(history: HistoryDraft, run: Path) -> int:
    """Seeds drafting with what the run has sampled before; returns the number of completions."""
    before = sampled_before(run, history.capacity)
    for prompt, completion in before:
        history.remember(prompt, completion)
    return len(before)


def refuse_unknown_tokens(path: Path, lines: Sequence[dict[str, Any]], vocab_size: int) -> None:
    """Raises UserError, naming the line, for a token that a model of `vocab_size` does not have."""
    for number, line in enumerate(lines, 1):
        if (largest := max([*line["prompt_ids"], *line["token_ids"]], default=0)) >= vocab_size:
            raise UserError(
                f"{path}:{number}: is not a rollout of this run: it has token {largest}, but the model's vocabulary "
                f"has {vocab_size} tokens"
            )


def rollout_of(line: dict[str, Any]) -> Rollout:
    """The rollout in a line of the file, without the example's name and metadata, and without its results."""
    return Rollout(
        Example(line["prompt"], line["answer"]),
        line["group"],
        line["prompt_ids"],
        line["token_ids"],
        line["log_probs"],
        line["finish_reason"],
        line["completion"],
        line["version"],
        truncated_logprobs=line.get("truncated_logprobs", []),
        versions=line.get("versions", []),
        routes=line.get("routes", []),
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _are(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and all(map(check, values))


def _are_rewards(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


ALWAYS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("prompt", "completion", "answer", "finish_reason"), _is_text),
    **dict.fromkeys(("group", "version"), _is_count),
    **dict.fromkeys(("reward", "advantage"), _is_number),
    "rewards": _are_rewards,
    **dict.fromkeys(("prompt_ids", "token_ids"), _are(_is_count)),
    "log_probs": _are(_is_number),
}
SOMETIMES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("dropped", "failure"), _is_text),
    **dict.fromkeys(("token_advantages", "values", "truncated_logprobs", "entropies"), _are(_is_number)),
    **dict.fromkeys(("reference_log_probs", "teacher_log_probs", "trainer_log_probs"), _are(_is_number)),
    "versions": _are(_is_count),
    "routes": _are(lambda value: value == "" or (_is_text(value) and is_written(value))),
    "sampled": _are(lambda value: type(value) is int and value in (0, 1)),
}


def _problem(line: Any) -> str:
    """What is wrong with a line; empty if nothing is."""
    if not isinstance(line, dict):
        return "not a JSON object"
    if missing := [name for name in ALWAYS if name not in line]:
        return f"it has no {missing[0]}"
    for name, fits in (ALWAYS | SOMETIMES).items():
        if name in line and not fits(line[name]):
            return f"its {name} cannot be {line[name]!r:.40}"
    tokens: list[int] = line["token_ids"]
    is_sampled: list[int] = line.get("sampled", [1] * len(tokens))
    if len(is_sampled) != len(tokens):
        return f"its sampled has {len(is_sampled)} entries for {len(tokens)} tokens"
    sampled = sum(is_sampled)
    for name in ("log_probs", "truncated_logprobs", "versions", "routes"):
        if len(values := line.get(name) or line["log_probs"]) != sampled:
            return f"it has {len(values)} {name} for {sampled} sampled tokens"
    # A conversation that failed before its first reply has neither.
    if not line["prompt_ids"] and (tokens or "messages" not in line):
        return "its prompt_ids are empty"
    return ""
