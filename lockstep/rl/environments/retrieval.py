"""Questions about a folder of texts, which the model searches and reads."""

from __future__ import annotations

import re
import sqlite3
import string
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import ConversationEnvironment
from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.problems import (
    SUFFIXES,
    needs_text,
    prompt_of,
    read_problems,
    text_of,
)
from lockstep.rl.environments.protocol import Example

NEEDS = "`question` and `answer` (a string, or a list of right answers)"
TEXT_KEYS, QUESTION_KEYS, ANSWER_KEYS = ("text", "contents", "content"), ("question", "prompt"), ("answer", "answers")
FOLDER, TEXTS = "documents", (".txt", ".md")
HITS, PAGE = 5, 4000
INSTRUCTION = "\n\nSearch the texts for it. Reply with the last line `Answer: …`, as short as it can be."
ANSWER = re.compile(r"^[^\w\n]*Answer:[ \t]*(.*)$", re.MULTILINE)
MAX_ANSWER_CHARACTERS = 500


class Retrieval(ConversationEnvironment):
    """Lines of `question` and `answer`, next to a folder `documents`: texts, or JSON or Parquet with `text` and `id`.

    The model has two tools: `search` (BM25, with SQLite's full-text index in memory) and `read`. Rewards: `correct`, 1
    if the answer is one of the correct ones, and `f1`, the overlap of their words, both after SQuAD's normalization
    (arXiv 1606.05250, section 6).
    """

    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "f1": 0.3}
    turns = 8
    marks_reasoning = True
    unfinished: ClassVar[Mapping[str, float]] = {"correct": 0.0, "f1": 0.0}

    def __init__(self, data: str = "", skip_bad_lines: bool = False):
        super().__init__(data, skip_bad_lines)
        self.tools: Sequence[Callable[..., Any]] = (self.search, self.read)  # type: ignore[misc]
        if data:
            # Built here, not at first use, so that forked processes of conversations share it.
            self.index = Index(Path(data) / FOLDER, skip_bad_lines)

    def examples(self, split: str) -> Iterator[Example]:
        for where, values in read_problems(self.data, split, self.skip_bad_lines, NEEDS):
            question, answers = prompt_of(values, QUESTION_KEYS, INSTRUCTION), _answers(values)
            if question is not None and answers:
                kwargs = values["chat_template_kwargs"]
                yield Example(question, answers[0], where, {"answers": answers}, kwargs)
            elif not self.skip_bad_lines:
                raise needs_text(where, values, QUESTION_KEYS if question is None else ANSWER_KEYS)

    def search(self, query: str) -> str:
        """Finds the texts that fit some words best.

        Args:
            query: the words to look for
        """
        hits = self.index.search(query)
        return "\n".join(f"[{name}] {snippet}" for name, snippet in hits) or "nothing found; try other words"

    def read(self, id: str, page: int = 1) -> str:
        """Reads a text that a search has found.

        Args:
            id: what stood in [ ] before it
            page: which of its pages, from 1
        """
        text = self.index.read(id.strip().strip("[]"))
        pages = max(1, -(-len(text) // PAGE))
        if not 1 <= page <= pages:
            raise ValueError(f"the text has the pages 1 to {pages}")
        rest = f"\n(page {page} of {pages})" if pages > 1 else ""
        return text[(page - 1) * PAGE : page * PAGE] + rest

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        matches = ANSWER.findall(answer_text(completion))
        given = matches[-1] if matches else ""
        answers = example.metadata.get("answers", [example.answer])
        if not given or len(given) > MAX_ANSWER_CHARACTERS:
            return {"correct": 0.0, "f1": 0.0}
        exact = any(normalized(given) == normalized(answer) != "" for answer in answers)
        return {"correct": float(exact), "f1": max(f1(answer, given) for answer in answers)}


class Index:
    """Texts by name, with BM25 search (SQLite's FTS5). Thread-safe."""

    def __init__(self, folder: Path, skip_bad_lines: bool = False):
        self.lock = threading.Lock()
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self.database.execute("CREATE VIRTUAL TABLE texts USING fts5(name UNINDEXED, text, tokenize='porter')")
        except sqlite3.OperationalError as error:
            raise UserError(f"this Python's SQLite has no full-text index ({error}); use another build") from error
        names: set[str] = set()
        for where, name, text in _texts(folder, skip_bad_lines):
            if name in names:
                raise UserError(f"{where}: there is already a text with the id {name!r}; make each `id` unique")
            names.add(name)
            self.database.execute("INSERT INTO texts VALUES (?, ?)", (name, text))
        if not names:
            raise UserError(f"{folder}: contains no texts; put .txt, .md, .jsonl, .json or .parquet files into it")

    def search(self, query: str) -> list[tuple[str, str]]:
        """(name, words around the hits) of the best texts."""
        # Only quoted words, as the model's query could contain operators or be invalid.
        words = re.findall(r"\w+", query)[:32]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        sql = "SELECT name, snippet(texts, 1, '', '', ' … ', 32) FROM texts WHERE texts MATCH ? ORDER BY rank, name"
        with self.lock:
            rows = self.database.execute(sql, (match,)).fetchmany(HITS)
        return [(name, " ".join(snippet.split())) for name, snippet in rows]

    def read(self, name: str) -> str:
        """Raises ValueError if there is no text of this name."""
        with self.lock:
            row = self.database.execute("SELECT text FROM texts WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise ValueError(f"there is no text {name[:80]!r}; use what a search gave in [ ]")
        return str(row[0])


def _texts(folder: Path, skip_bad_lines: bool) -> Iterator[tuple[str, str, str]]:
    """(where, name, text) of each text, ordered by path."""
    from lockstep.data.records import Tally, read_records  # a reward worker does not need numpy

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give --data a folder that contains `{FOLDER}` and train.jsonl")
    for path in sorted(p for p in folder.rglob("*") if p.name.endswith((*TEXTS, *SUFFIXES)) and p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix in TEXTS:
            try:
                yield str(path), name, path.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                if not skip_bad_lines:
                    raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); fix it") from error
            continue
        for where, values in read_records(path, skip_bad_lines, Tally()):
            text = text_of(values, TEXT_KEYS)
            if text is not None:
                title = text_of(values, ("title",))
                full = f"{title}\n{text}" if title else text
                yield where, text_of(values, ("id",)) or where.removeprefix(f"{folder}/"), full
            elif not skip_bad_lines:
                raise needs_text(where, values, TEXT_KEYS)


def _answers(values: Mapping[str, Any]) -> list[str]:
    for key in ANSWER_KEYS:
        value = values.get(key)
        answers = value if isinstance(value, list) else [value]
        texts = [text for answer in answers if (text := text_of({"answer": answer}, ("answer",)))]
        if texts and len(texts) == len(answers):
            return texts
    return []


def normalized(text: str) -> str:
    """SQuAD's normalization of answers: lower case, no punctuation, no articles, single spaces."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def f1(answer: str, given: str) -> float:
    """The harmonic mean of precision and recall of the words of `given`, as SQuAD defines it."""
    expected, actual = Counter(normalized(answer).split()), Counter(normalized(given).split())
    shared = (expected & actual).total()
    if not shared:
        return 0.0
    return 2 * shared / (expected.total() + actual.total())
