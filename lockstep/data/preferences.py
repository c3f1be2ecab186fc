"""Tokenizes preferences: pairs of a chosen and a rejected answer, or single answers with labels.

An example is one document of a corpus; a pair is its two whole sequences, concatenated. One byte per token holds flags:
the token is scored (`SCORED`); a pair's second sequence begins here, or the answer is desirable (`MARK`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.chat import ChatTemplate, ChatTemplateError
from lockstep.data.conversations import TOOLS, Conversation, ConversationEncoder, ConversationSource
from lockstep.data.corpus import TokenizedCorpus
from lockstep.data.encode import Encoded, token_dtype
from lockstep.data.messages import are_messages
from lockstep.data.rows import Piece, Row, Rows
from lockstep.data.tokenizer import Tokenizer

SCORED, MARK = 1, 2


class PreferenceSource(ConversationSource):
    """Lines or rows, unchanged; a data set on the hub is read completely, to score its examples before the run."""

    keys = (
        *("prompt", "chosen", "rejected", "completion", "label", "system", "question", "instruction", "input"),
        *("chat_template_kwargs", *TOOLS),
    )

    def __init__(self, data: str, skip_bad_lines: bool = False):
        super().__init__(data, skip_bad_lines)
        self.streamed = False


@dataclass
class PreferenceEncoder:
    """Tokens of `chosen` and `rejected` after `prompt`, or of `completion` with its `label`, as in TRL's data sets.

    All are texts, or all lists of messages; without a `prompt`, the answers' common prefix is the prompt. The answer is
    scored as in `ConversationEncoder`. Pairs of equal answers and examples longer than `longest` tokens are left out.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    longest: int
    paired: bool = True
    template_values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._answers = ConversationEncoder(self.tokenizer, self.template, "whole", self.template_values)

    def encode(self, batch: list[Conversation]) -> list[Encoded]:
        return [self._encode(conversation) for conversation in batch]

    def describe(self) -> dict[str, Any]:
        return {**self._answers.describe(), "longest": self.longest, "paired": self.paired}

    def weight(self, item: Conversation) -> int:
        return self._answers.weight(item)

    def _encode(self, line: Conversation) -> Encoded:
        try:
            if not self.paired:
                return self._labelled(line)
            return self._pair(line)
        except ChatTemplateError as error:
            return self._without(f"{line.where}: {error}; fix it")

    def _pair(self, line: Conversation) -> Encoded:
        prompt, (chosen, rejected) = _prompt_and_answers(line.values)
        if chosen == rejected:
            return self._without(f"{line.where}: its two answers are identical", "equal_pairs")
        both = [self._answer(line, prompt, answer) for answer in (chosen, rejected)]
        if bad := next((one for one in both if one.problem), None):
            return bad
        tokens = np.concatenate([one.tokens for one in both])
        if np.array_equal(both[0].tokens, both[1].tokens):
            return self._without(f"{line.where}: its two answers have identical tokens", "equal_pairs")
        answers = [_scored(one) for one in both]
        marks = np.concatenate(answers)
        marks[len(both[0].tokens)] |= MARK
        return self._fitting(line, tokens, marks, *answers)

    def _labelled(self, line: Conversation) -> Encoded:
        prompt, completion, label = (line.values.get(name) for name in ("prompt", "completion", "label"))
        if not isinstance(label, bool):
            raise ChatTemplateError('needs "label", true or false, along with "prompt" and "completion"')
        if _kind(prompt) != _kind(completion) or not _kind(prompt):
            raise ChatTemplateError('"prompt" and "completion" must both be texts or both lists of messages')
        one = self._answer(line, prompt, completion)
        if one.problem:
            return one
        marks = _scored(one)
        marks[0] |= MARK * label
        return self._fitting(line, one.tokens, marks, marks)

    def _fitting(self, line: Conversation, tokens: np.ndarray, marks: np.ndarray, *answers: np.ndarray) -> Encoded:
        if not all((answer & SCORED).any() for answer in answers):
            return self._without(f"{line.where}: its answer has no token that can be scored; give it a prompt")
        if len(tokens) > self.longest:
            kind = "long_pairs" if self.paired else "long_examples"
            return self._without(f"{line.where}: has {len(tokens)} tokens, but a row has {self.longest}", kind)
        return Encoded(tokens, marks)

    def _answer(self, line: Conversation, prompt: Any, answer: Any) -> Encoded:
        """The whole sequence, with its answer scored."""
        options = {name: line.values.get(name) for name in ("system", "chat_template_kwargs", *TOOLS)}
        values = {"prompt": prompt, "completion": answer, **options}
        (scored_text,) = self._answers.scored_texts(values)
        return self._answers.tokens(line.where, scored_text)

    def _without(self, problem: str, left_out: str = "") -> Encoded:
        return Encoded(np.empty(0, token_dtype(self.tokenizer)), problem=problem, left_out=left_out)


def _scored(one: Encoded) -> np.ndarray:
    assert one.scored is not None
    marks = one.scored.astype(np.uint8)
    marks[0] = 0  # it has no context
    return marks


def _kind(value: Any) -> str:
    """`text`, `messages`, or empty for anything else."""
    if isinstance(value, str):
        return "text"
    return "messages" if value and are_messages(value) else ""


def _prompt_and_answers(values: dict[str, Any]) -> tuple[Any, tuple[Any, Any]]:
    prompt: Any = values.get("prompt")
    chosen: Any = values.get("chosen")
    rejected: Any = values.get("rejected")
    if prompt is None and _kind(chosen) == _kind(rejected) == "text":
        prompt = _question(values)
    if _kind(prompt) == "text" and _kind(chosen) == _kind(rejected) == "messages":
        prompt = None  # as in TRL: the answers are whole conversations, and the prompt is the text of their beginning
    kinds = {_kind(value) for value in (chosen, rejected, *([] if prompt is None else [prompt]))}
    if len(kinds) > 1 or "" in kinds:
        if chosen is None and isinstance(values.get("label"), bool):
            raise ChatTemplateError('has a "label" and no "chosen" and "rejected": train on it with --loss kto')
        present = ", ".join(f"{name}: {_kind(v) or 'neither'}" for name, v in values.items() if v is not None)
        raise ChatTemplateError(
            'needs "chosen" and "rejected", and "prompt" or the prompt in both: all texts, or all lists of '
            f"messages (here: {present:.200})"
        )
    if prompt is None:
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
        if not shared:
            raise ChatTemplateError('its two answers begin differently, so it needs a "prompt"')
        if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
            shared -= 1  # a space belongs to the word after it
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    return prompt, (chosen, rejected)


def _question(values: dict[str, Any]) -> str | None:
    """A text prompt under its names in other layouts."""
    question, context = values.get("question") or values.get("instruction"), values.get("input")
    if not isinstance(question, str):
        return None
    return f"{question}\n\n{context}" if isinstance(context, str) and context.strip() else question


class AnswerTokens(NamedTuple):
    """A whole sequence: a prompt and an answer."""

    tokens: list[int]
    scored: list[int]
    """Positions of the answer's tokens that are scored, ascending, the first at least 1."""


@dataclass(frozen=True)
class Example:
    """A pair: chosen, then rejected; or a labeled answer, then another example's answer to the same prompt."""

    sequences: tuple[AnswerTokens, AnswerTokens]
    desirable: bool
    """Whether the label is true; meaningless for a pair."""
    reference: tuple[float, float] = (math.nan, math.nan)
    """The reference's log-probabilities of the sequences' scored tokens, in nats, if known."""


@dataclass(frozen=True)
class PreferenceRow(Row):
    """A row with its examples; `lengths` are those of all sequences."""

    examples: list[Example] = field(kw_only=True)


class PreferenceRows(Rows):
    """Rows of whole examples, each of which is one target; `packing` must be "whole"."""

    paired = True

    def targets(self, pieces: list[Piece]) -> int:
        """Examples of a planned row."""
        return len(pieces)

    def read(self, pieces: list[Piece]) -> PreferenceRow:
        """A planned row's examples, and its tokens."""
        row = super().read(pieces)
        examples = [read_example(piece.corpus, number_of(piece), self.paired, self.sequence_length) for piece in pieces]
        lengths = [len(s.tokens) for e in examples for s in (e.sequences if self.paired else e.sequences[:1])]
        scored = np.zeros_like(row.scored)
        start = 0
        for example in examples:
            for sequence in example.sequences if self.paired else example.sequences[:1]:
                scored[np.array(sequence.scored, dtype=np.int64) + start] = True
                start += len(sequence.tokens)
        padding = row.tokens.size - start
        return PreferenceRow(row.tokens, lengths + ([padding] if padding else []), scored, padding, examples=examples)


class LabelledRows(PreferenceRows):
    """Rows of labeled answers."""

    paired = False


def number_of(piece: Piece) -> int:
    """Index in its corpus of the document that a piece is from."""
    return int(np.searchsorted(piece.corpus.offsets, piece.start, side="right")) - 1


def read_example(corpus: TokenizedCorpus, number: int, paired: bool, longest: int) -> Example:
    """The example in document `number`, with sequences of at most `longest` tokens."""
    tokens, marks = _document(corpus, number)
    desirable = False
    if paired:
        second = int(np.flatnonzero(marks & MARK)[0])
        sequences = _sequence(tokens[:second], marks[:second]), _sequence(tokens[second:], marks[second:])
    else:
        desirable = bool(marks[0] & MARK)
        other, other_marks = _document(corpus, (number + 1) % (len(corpus.offsets) - 1))
        here, there = int(np.flatnonzero(marks & SCORED)[0]), int(np.flatnonzero(other_marks & SCORED)[0])
        mixed = np.concatenate([tokens[:here], other[there:]]), np.concatenate([marks[:here], other_marks[there:]])
        sequences = _sequence(tokens, marks), _sequence(mixed[0][:longest], mixed[1][:longest])
    known = corpus.reference
    reference = (math.nan, math.nan) if known is None else (float(known[number, 0]), float(known[number, 1]))
    return Example(sequences, desirable, reference)


def _document(corpus: TokenizedCorpus, number: int) -> tuple[np.ndarray, np.ndarray]:
    start, stop = int(corpus.offsets[number]), int(corpus.offsets[number + 1])
    assert corpus.scored is not None
    return corpus.read(start, stop), corpus.scored[start:stop]


def _sequence(tokens: np.ndarray, marks: np.ndarray) -> AnswerTokens:
    return AnswerTokens(tokens.tolist(), np.flatnonzero(marks & SCORED).tolist())
