"""Names to sort, with more in every turn that the model must merge into its list.

The task is that of the public alphabet-sort environments (`primeintellect/alphabet-sort`); names and grading are ours.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from lockstep.rl.conversations import Chat, ConversationEnvironment
from lockstep.rl.environments.protocol import Example

FIRST = (
    "Ada", "Amir", "Anna", "Bela", "Boris", "Carla", "Chen", "Dora", "Emil", "Farah", "Felix", "Greta", "Hugo",
    "Ines", "Ivan", "Jonas", "Kai", "Lena", "Luis", "Mara", "Milan", "Nadia", "Nils", "Olga", "Omar", "Paula",
    "Priya", "Rafael", "Rosa", "Samir", "Sofia", "Tariq", "Tess", "Ulla", "Victor", "Wanda", "Yara", "Yusuf",
    "Zeno", "Zoe"
)  # fmt: skip
LAST = (
    "Abel", "Ahmadi", "Baker", "Becker", "Castro", "Cohen", "Diaz", "Dubois", "Eriksen", "Fischer", "Fonseca",
    "Garcia", "Gruber", "Haas", "Hansen", "Ito", "Jansen", "Kaya", "Keller", "Lang", "Lopez", "Meyer", "Mori",
    "Nagy", "Novak", "Okafor", "Olsen", "Patel", "Petrov", "Quinn", "Rossi", "Ruiz", "Sato", "Silva", "Tanaka",
    "Urban", "Vidal", "Weber", "Yilmaz", "Zhang"
)  # fmt: skip
COUNTS = {"train": 2000, "validation": 100}
POWER = 4
"""Exponent of the similarity: half a list is worth a sixteenth."""
BEGIN, END = "<sorted>", "</sorted>"


class AlphabetSort(ConversationEnvironment):
    """Two to four names in each of one to three turns, to sort by first or last name, in `<sorted>` tags.

    Rewards: `similarity` of each turn's list to the correct one, to the fourth power, averaged over turns; and
    `correct`, 1 if all lists are correct.
    """

    reward_weights: ClassVar[Mapping[str, float]] = {"similarity": 1.0, "correct": 0.5}
    turns = 3
    unfinished: ClassVar[Mapping[str, float]] = {"similarity": 0.0, "correct": 0.0}

    def examples(self, split: str) -> Iterator[Example]:
        for number in range(COUNTS[split]):
            draw = random.Random(f"{split} {number}")
            sizes = [draw.randint(2, 4) for _ in range(draw.randint(1, 3))]
            # First names, and last names, are distinct, so there is exactly one correct order.
            firsts, lasts = draw.sample(FIRST, sum(sizes)), draw.sample(LAST, sum(sizes))
            names = iter(f"{first} {last}" for first, last in zip(firsts, lasts))
            turns = [[next(names) for _ in range(size)] for size in sizes]
            by = draw.choice(["first", "last"])
            yield Example(question(turns[0], by), id=f"{split}:{number}", metadata={"turns": turns, "by": by})

    async def converse(self, example: Example, chat: Chat) -> dict[str, float]:
        turns, by = example.metadata["turns"], example.metadata["by"]
        scores: list[float] = []
        names_so_far: list[str] = []
        for turn in turns:
            chat.add(example.prompt if not names_so_far else _more(turn))
            names_so_far += turn
            expected = sorted(names_so_far, key=lambda name: name.split()[0 if by == "first" else 1])
            scores.append(similarity(expected, listed((await chat.reply()).spoken)))
        return {
            "similarity": sum(score**POWER for score in scores) / len(scores),
            "correct": float(all(score == 1.0 for score in scores)),
        }


def question(names: Sequence[str], by: str) -> str:
    """The first question."""
    return (
        f"Sort these names alphabetically by {by} name. Reply with all names, one per line, between <sorted> and "
        f"</sorted>.\n\n{_lines(names)}"
    )


def _more(names: Sequence[str]) -> str:
    return f"Here are more names. Reply with all names so far, sorted in the same way.\n\n{_lines(names)}"


def _lines(names: Sequence[str]) -> str:
    return "\n".join(names)


def listed(text: str) -> list[str]:
    """The names of a reply's last list; empty if there is none."""
    begin = text.rfind(BEGIN, 0, max(0, text.rfind(END)))
    if begin < 0:
        return []
    names = text[begin + len(BEGIN) : text.find(END, begin)]
    return [" ".join(line.split()) for line in names.split("\n") if line.strip()]


def similarity(expected: Sequence[str], actual: Sequence[str]) -> float:
    """Similarity of two lists in content and order, from 0 to 1 (Ratcliff and Obershelp, on lines)."""
    # Far too long lists count as wrong; comparing them would take long.
    if len(actual) > 2 * len(expected):
        return 0.0
    return difflib.SequenceMatcher(None, expected, actual, autojunk=False).ratio()
