"""Reads problems from files or the hub: locates splits, and validates lines."""

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
"""Names of a split's file, or of its split of a data set on the hub."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HELD_OUT = 10
"""In a single file or split, every tenth problem is for validation."""

KINDS = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
"""Names of JSON's types other than string and number."""


def read_problems(data: str, split: str, skip_bad_lines: bool, needs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of each problem of a split.

    `data` is a folder with `train.jsonl` and `validation.jsonl` or `test.jsonl` (or .jsonl.gz, .json, .parquet), one
    such file, in which every tenth problem is for validation, or `hf:NAME[:config][:split]` with such splits. Every
    problem gets `chat_template_kwargs`, possibly empty. needs: the fields of a problem, for the error message. Raises
    UserError for a missing file, and as `read_records`.
    """
    from lockstep.data.records import HUB, Tally, read_hub, read_records  # a reward worker does not need numpy

    if data.startswith(HUB):
        name, is_shared = _on_the_hub(data, split)
        problems, source = read_hub(name), name
    else:
        path, is_shared = _file(data, split, needs)
        problems, source = read_records(path, skip_bad_lines, Tally()), str(path)
    number = 0
    for where, values in problems:
        number = int(where.rpartition(":")[2].split()[-1])
        if is_shared and (number % HELD_OUT == 0) != (split == "validation"):
            continue
        if (kwargs := _template_values(values)) is not None:
            yield where, {**values, **_prompt_in_json(values), "chat_template_kwargs": kwargs}
        elif not skip_bad_lines:
            raise UserError(
                f"{where}: its `chat_template_kwargs` are not an object, nor JSON of one; fix it or use "
                "--skip-bad-lines"
            )
    if is_shared and split == "validation" and number < HELD_OUT:
        lines = "1 problem" if number == 1 else f"{number} problems"
        raise UserError(f"{source} has {lines}; every tenth is for validation, so give at least {HELD_OUT}")


def _file(data: str, split: str, needs: str) -> tuple[Path, bool]:
    """The file of a split, and whether both splits share it."""
    path = Path(data)
    if path.is_file():
        return path, True
    candidates = [path / f"{name}{suffix}" for name in NAMES[split] for suffix in SUFFIXES]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if data and file is not None:
        return file, False
    missing = f"{data}: contains no {' or '.join(NAMES[split])}.jsonl" if data else "the environment needs data"
    raise UserError(
        f"{missing}; give --data a folder with train.jsonl and validation.jsonl (or test.jsonl; .json and .parquet "
        f"work too), one such file, or hf:NAME[:config][:split], with {needs} in each line"
    )


def _on_the_hub(data: str, split: str) -> tuple[str, bool]:
    """The data set's split with the problems of `split`, and whether both splits share it."""
    from lockstep.data.records import hub_parts, hub_splits

    path, config, hub_split = hub_parts(data)
    if hub_split:
        return data, True
    splits = hub_splits(data)
    if "train" not in splits:
        raise UserError(f"{data}: has no split train; name one of {', '.join(splits)} as hf:NAME:config:split")
    held_out = next((name for name in NAMES["validation"] if name in splits), "")
    name = "train" if split == "train" else held_out
    return f"hf:{path}:{config}:{name or 'train'}", not held_out


def text_of(values: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The text of the first key that has one, or None. A number counts as text."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value.strip():
            return value
    return None


def prompt_of(values: dict[str, Any], keys: Sequence[str], instruction: str = "") -> str | list[Message] | None:
    """The prompt of the first key that has one, a text or a list of messages, plus an instruction; None: there is none.

    Messages take precedence over texts, which are usually the columns they were made from. The instruction is appended
    to the text, or to the last user message.
    """
    for key in _messages_first(values, keys):
        if isinstance(prompt := values.get(key), list):
            with suppress(ValueError):
                return with_instruction(prompt_messages(prompt), instruction)
            return None
        if (text := text_of(values, (key,))) is not None:
            return text + instruction
    return None


def answer_of(values: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The text of the first key that has one, or else of verl's `reward_model.ground_truth`; None: neither."""
    reward_model = values.get("reward_model")
    truth = reward_model if isinstance(reward_model, dict) else {}
    return text_of(values, keys) or text_of(truth, ("ground_truth",))


def _messages_first(values: dict[str, Any], keys: Sequence[str]) -> list[str]:
    return sorted(keys, key=lambda key: not _has_objects(values.get(key)))


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _prompt_in_json(values: dict[str, Any]) -> dict[str, list[Any]]:
    """A line's `prompt` if it is JSON of messages in a text, as in tables without nested columns."""
    text = values.get("prompt")
    if isinstance(text, str) and text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            messages = json.loads(text)
            if _has_objects(messages) and all(isinstance(m, dict) and "role" in m for m in messages):
                return {"prompt": messages}
    return {}


def _template_values(values: dict[str, Any]) -> dict[str, Any] | None:
    """A line's `chat_template_kwargs`, an object or JSON of one; None if they are invalid."""
    kwargs = values.get("chat_template_kwargs")
    if isinstance(kwargs, str):
        with suppress(ValueError, RecursionError):
            kwargs = json.loads(kwargs)
    if kwargs is not None and not isinstance(kwargs, dict):
        return None
    return {name: value for name, value in (kwargs or {}).items() if value is not None}


def needs_text(where: str, values: dict[str, Any], keys: Sequence[str]) -> UserError:
    """The error for a line without a text for any of the keys."""
    if present := next((key for key in _messages_first(values, keys) if key in values), None):
        value = values[present]
        if _has_objects(value):
            try:
                prompt_messages(value)
            except ValueError as error:
                return UserError(f"{where}: `{present}` {error}; fix it or use --skip-bad-lines")
        kind = "empty" if isinstance(value, str) or value == [] else f"{KINDS[type(value)]}, not a string"
        return UserError(f"{where}: `{present}` is {kind}; fix it or use --skip-bad-lines")
    hint = next((h for key in keys if (h := closest(key, values))), "")
    names = " or ".join(f"`{key}`" for key in keys)
    return UserError(f"{where}: needs the string {names}.{hint} Fix it or use --skip-bad-lines")
