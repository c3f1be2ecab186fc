"""A model's answers to some prompts of the conversations, before and after fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lockstep.config import EngineConfig
from lockstep.data import Row, Tokenizer
from lockstep.generate import Engine, SamplingParams
from lockstep.model import Decoder
from lockstep.observe import RunFolder

PROMPTS, TOKENS = 8, 64
"""The number of prompts, and the maximum number of tokens per answer."""


class Answers:
    """Greedy answers to the first turns of some rows' conversations, for the report."""

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, run: Path):
        self._tokenizer, self._run = tokenizer, RunFolder(run)
        turns = (turn for row in rows for turn in _first_turns(row))
        self._turns = [turn for turn, _ in zip(turns, range(PROMPTS))]

    def write(self, step: int, model: Decoder) -> None:
        """Writes the answers of `model`, which is not sharded, at `step`."""
        longest = model.config.max_positions - TOKENS
        turns = [(prompt, answer) for prompt, answer in self._turns if len(prompt) <= longest]
        capacity = sum(len(prompt) + TOKENS + 16 for prompt, _ in turns)
        engine = Engine(model, EngineConfig(cache_tokens=max(capacity, 64), max_sequences=PROMPTS), self._tokenizer)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
        completions = engine.generate([prompt for prompt, _ in turns], params)
        path = self._run.validation_path(step)
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            for group, ((prompt, answer), (completion,)) in enumerate(zip(turns, completions)):
                texts = {"prompt": prompt, "answer": answer, "completion": completion.token_ids}
                line = {name: self._text(tokens) for name, tokens in texts.items()}
                file.write(json.dumps({**line, "group": group, "rewards": {}, "reward": 0.0}) + "\n")

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token != self._tokenizer.eos_id])


def _first_turns(row: Row) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens before the assistant's first message, tokens of that message) of each conversation in a row."""
    ends = np.cumsum(row.lengths)
    for start, end, shared in zip([0, *ends[:-1]], ends, row.shared or [0] * len(ends)):
        scored = np.flatnonzero(row.scored[start:end])
        if len(scored) and scored[0] > 0 and not shared:
            stop = next((int(i) for i, j in zip(scored, scored[1:]) if j != i + 1), int(scored[-1])) + 1
            tokens = row.tokens[start:end].tolist()
            yield tokens[: scored[0]], tokens[scored[0] : stop]
