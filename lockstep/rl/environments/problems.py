"""Problems from files or the hub: where to find a split, and what a line must contain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, closest
from lockstep.rl.conversations.message_prompts import prompt_messages, with_instruction
from lockstep.rl.environments.protocol import Message

NAMES = {"train": ("train",), "validation": ("validation", "test")}
"""Of files, and of splits of data sets on the hub."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HELD_OUT = 10
"""Of a single file or split, every tenth problem is for validation."""

KINDS = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
"""JSON's types other than strings and numbers."""


def read_problems(data: str, split: str, skip_bad_lines: bool, needs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of each problem of a split.

    `data` is a folder with `train.jsonl` and `validation.jsonl` or `test.jsonl` (or .jsonl.gz, .json, .parquet), one
    such file, in which every tenth problem is for validation, or `hf:NAME[:config][:split]` with such splits. Every
    problem has `chat_template_kwargs`, maybe empty. Raises UserError for a missing file, saying what problems need, and
    as `read_records`.
    """
    from lockstep.data.records import HUB, Tally, read_hub, read_records  # a reward worker does not need numpy

    if data.startswith(HUB):
        name, divided = _on_the_hub(data, split)
        problems, place = read_hub(name), name
    else:
        path, divided = _file(data, split, needs)
        problems, place = read_records(path, skip_bad_lines, Tally()), str(path)
    number = 0
    for where, values in problems:
        number = int(where.rpartition(":")[2].split()[-1])
        if divided and (number % HELD_OUT == 0) != (split == "validation"):
            continue
        if (given := _template_values(values)) is not None:
            yield where, {**values, **_prompt_in_json(values), "chat_template_kwargs": given}
        elif not skip_bad_lines:
            raise UserError(
                f"{where}: its `chat_template_kwargs` are not an object, nor JSON of one; fix it or use "
                "--skip-bad-lines"
            )
    if divided and split == "validation" and number < HELD_OUT:
        lines = "1 problem" if number == 1 else f"{number} problems"
        raise UserError(f"{place} has {lines}; every tenth is for validation, so give at least {HELD_OUT}")


def _file(data: str, split: str, needs: str) -> tuple[Path, bool]:
    """The file of a split, and whether it has the problems of both splits."""
    place = Path(data)
    if place.is_file():
        return place, True
    files = [place / f"{name}{suffix}" for name in NAMES[split] for suffix in SUFFIXES]
    path = next((file for file in files if file.is_file()), None)
    if data and path is not None:
        return path, False
    missing = f"{data}: contains no {' or '.join(NAMES[split])}.jsonl" if data else "the environment needs data"
    raise UserError(
        f"{missing}; give --data a folder with train.jsonl and validation.jsonl (or test.jsonl; .json and .parquet "
        f"work too), one such file, or hf:NAME[:config][:split], with {needs} in each line"
    )


def _on_the_hub(data: str, split: str) -> tuple[str, bool]:
    """A data set's split with the problems of `split`, and whether it has those of both."""
    from lockstep.data.records import hub_parts, hub_splits

    path, config, given = hub_parts(data)
    if given:
        return data, True
    found = hub_splits(data)
    if "train" not in found:
        raise UserError(f"{data}: has no split train; name one of {', '.join(found)} as hf:NAME:config:split")
    held_out = next((name for name in NAMES["validation"] if name in found), "")
    name = "train" if split == "train" else held_out
    return f"hf:{path}:{config}:{name or 'train'}", not held_out


def text_of(values: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The text of the first of the keys that has one; None if none has. A number counts as text."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value.strip():
            return value
    return None


def prompt_of(values: dict[str, Any], keys: Sequence[str], instruction: str = "") -> str | list[Message] | None:
    """What the first of the keys asks, a text or a list of messages, with an instruction; None if none asks anything.

    Messages win over texts, which are columns that they were made from. The instruction is added to the text, or to
    what the user says last.
    """
    for key in _messages_first(values, keys):
        if isinstance(given := values.get(key), list):
            with suppress(ValueError):
                return with_instruction(prompt_messages(given), instruction)
            return None
        if (text := text_of(values, (key,))) is not None:
            return text + instruction
    return None


def answer_of(values: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The text of the first of the keys that has one, or else of verl's `reward_model.ground_truth`; None: neither."""
    judged = values.get("reward_model")
    truth = judged if isinstance(judged, dict) else {}
    return text_of(values, keys) or text_of(truth, ("ground_truth",))


def _messages_first(values: dict[str, Any], keys: Sequence[str]) -> list[str]:
    return sorted(keys, key=lambda key: not _has_objects(values.get(key)))


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)


def _prompt_in_json(values: dict[str, Any]) -> dict[str, list[Any]]:
    """A line's `prompt`, if it is a text with the JSON of messages, as tables without nested columns hold them."""
    text = values.get("prompt")
    if isinstance(text, str) and text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
            if _has_objects(found) and all(isinstance(one, dict) and "role" in one for one in found):
                return {"prompt": found}
    return {}


def _template_values(values: dict[str, Any]) -> dict[str, Any] | None:
    """A line's `chat_template_kwargs`, an object or JSON of one; None if they are anything else."""
    given = values.get("chat_template_kwargs")
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    if given is not None and not isinstance(given, dict):
        return None
    return {name: value for name, value in (given or {}).items() if value is not None}


def needs_text(where: str, values: dict[str, Any], keys: Sequence[str]) -> UserError:
    """The error for a line that has no text for any of the keys."""
    if there := next((key for key in _messages_first(values, keys) if key in values), None):
        value = values[there]
        if _has_objects(value):
            try:
                prompt_messages(value)
            except ValueError as error:
                return UserError(f"{where}: `{there}` {error}; fix it or use --skip-bad-lines")
        kind = "empty" if isinstance(value, str) or value == [] else f"{KINDS[type(value)]}, not a string"
        return UserError(f"{where}: `{there}` is {kind}; fix it or use --skip-bad-lines")
    hint = next((h for key in keys if (h := closest(key, values))), "")
    names = " or ".join(f"`{key}`" for key in keys)
    return UserError(f"{where}: needs the string {names}.{hint} Fix it or use --skip-bad-lines")
