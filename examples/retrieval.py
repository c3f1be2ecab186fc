"""Questions about a folder of texts, which the model searches and reads.

lockstep rl --environment examples/retrieval.py:Retrieval --data DATA --model DIR

DATA has train.jsonl and validation.jsonl, lines of `question` and `answer`, and a folder `documents` of .txt files.
"""

import re
import sqlite3
import threading
from pathlib import Path

import lockstep.rl as rl
from lockstep.errors import UserError
from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.problems import read_problems

HITS, PAGE = 5, 4000
INSTRUCTION = "\n\nSearch the texts for it. Reply with the last line `Answer: …`, as short as it can be."


class Retrieval(rl.ConversationEnvironment):
    """The reward is `correct`, 1 if the answers are equal but for case, punctuation and articles."""

    turns = 8
    marks_reasoning = True  # only what follows the reasoning is an answer
    unfinished = {"correct": 0.0}

    def __init__(self, data: str = "", skip_bad_lines: bool = False):
        super().__init__(data, skip_bad_lines)
        self.tools = (self.search, self.read)
        # Built here, not at first use, so that forked processes of conversations share it.
        self.index = sqlite3.connect(":memory:", check_same_thread=False)
        self.lock = threading.Lock()  # conversations call tools in several threads
        self.index.execute("CREATE VIRTUAL TABLE texts USING fts5(name UNINDEXED, text, tokenize='porter')")
        files = sorted(Path(data, "documents").rglob("*.txt"))
        if not files:
            raise UserError(f"{data or '--data'}: contains no texts; put .txt files into its folder `documents`")
        self.index.executemany("INSERT INTO texts VALUES (?, ?)", ((file.stem, file.read_text()) for file in files))

    def examples(self, split: str):
        for where, line in read_problems(self.data, split, self.skip_bad_lines, "`question` and `answer`"):
            yield rl.Example(line["question"] + INSTRUCTION, line["answer"], where)

    def search(self, query: str) -> str:
        """Finds the texts that fit some words best.

        Args:
            query: the words to look for
        """
        # Only quoted words, as the model's query could contain operators.
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query)[:32])
        snippet = "SELECT name, snippet(texts, 1, '', '', ' … ', 32) FROM texts WHERE texts MATCH ? ORDER BY rank, name"
        with self.lock:
            hits = self.index.execute(snippet, (words,)).fetchmany(HITS) if words else []
        return "\n".join(f"[{name}] {' '.join(text.split())}" for name, text in hits) or "nothing found"

    def read(self, id: str, page: int = 1) -> str:
        """Reads a text that a search has found.

        Args:
            id: what stood in [ ] before it
            page: which of its pages, from 1
        """
        with self.lock:
            row = self.index.execute("SELECT text FROM texts WHERE name = ?", (id.strip("[] "),)).fetchone()
        if row is None:
            raise ValueError(f"there is no text {id[:80]!r}; use what a search gave in [ ]")
        return row[0][max(0, page - 1) * PAGE : page * PAGE] or "the text has no such page"

    def reward(self, example: rl.Example, completion: str) -> dict[str, float]:
        given = re.findall(r"^\W*?Answer:(.*)$", answer_text(completion)[-1000:], re.MULTILINE)
        return {"correct": float(bool(given) and normalized(given[-1]) == normalized(example.answer) != "")}


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, as SQuAD compares answers (arXiv 1606.05250, section 6)."""
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))
