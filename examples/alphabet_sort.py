"""Names to sort, with more in every turn, which the model must merge into its list: a conversation of several turns.

lockstep rl --environment examples/alphabet_sort.py:AlphabetSort --model DIR
"""

import difflib
import random

import lockstep.rl as rl

FIRST = (
    "Ada", "Amir", "Bela", "Boris", "Carla", "Chen", "Dora", "Emil", "Farah", "Greta", "Hugo", "Ines", "Jonas", "Kai",
    "Lena", "Milan", "Nadia", "Omar", "Priya", "Zoe",
)  # fmt: skip
LAST = (
    "Abel", "Baker", "Castro", "Cohen", "Diaz", "Eriksen", "Fonseca", "Gruber", "Ito", "Kaya", "Lang", "Mori", "Novak",
    "Okafor", "Patel", "Quinn", "Sato",
)  # fmt: skip
COUNTS = {"train": 2000, "validation": 100}
FORM = "Reply with all names so far, sorted by {by} name, one per line, between <sorted> and </sorted>."


class AlphabetSort(rl.ConversationEnvironment):
    """Two to four names in each of one to three turns.

    Rewards: `similarity` of each turn's list to the right one, averaged, and `correct`, 1 if all are right.
    """

    turns = 3
    reward_weights = {"similarity": 1.0, "correct": 0.5}
    unfinished = {"similarity": 0.0, "correct": 0.0}

    def examples(self, split: str):
        for number in range(COUNTS[split]):
            draw = random.Random(f"{split} {number}")
            sizes = [draw.randint(2, 4) for _ in range(draw.randint(1, 3))]
            # No first or last name twice, so there is exactly one right order.
            pairs = zip(draw.sample(FIRST, sum(sizes)), draw.sample(LAST, sum(sizes)))
            turns = [[" ".join(next(pairs)) for _ in range(size)] for size in sizes]
            by = draw.choice(["first", "last"])
            yield rl.Example(_question(turns[0], by), id=f"{split}:{number}", metadata={"turns": turns, "by": by})

    async def converse(self, example: rl.Example, chat: rl.Chat) -> dict[str, float]:
        turns, by = example.metadata["turns"], example.metadata["by"]
        names: list[str] = []
        scores = []
        for turn in turns:
            chat.add(_question(turn, by))
            names += turn
            right = sorted(names, key=lambda name: name.split()[by == "last"])
            scores.append(similarity(right, listed((await chat.reply()).spoken)))
        return {"similarity": sum(scores) / len(scores), "correct": float(min(scores) == 1.0)}


def _question(names: list[str], by: str) -> str:
    return "\n".join(["Names to sort:", *names, "", FORM.format(by=by)])


def listed(text: str) -> list[str]:
    """The names of a reply's last list, without its reasoning; empty if there is none."""
    before, _, _ = text.rpartition("</sorted>")
    _, begin, names = before.rpartition("<sorted>")
    return [" ".join(line.split()) for line in names.split("\n") if line.strip()] if begin else []


def similarity(right: list[str], given: list[str]) -> float:
    """From 0 to 1, to the fourth power: half a list is worth a sixteenth. Far too long lists are worth nothing."""
    if len(given) > 2 * len(right):
        return 0.0
    return difflib.SequenceMatcher(None, right, given, autojunk=False).ratio() ** 4
