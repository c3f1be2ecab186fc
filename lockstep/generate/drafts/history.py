"""Guesses from earlier completions of the same prompt: in reinforcement, the policy changes little between epochs."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from weakref import WeakKeyDictionary, WeakValueDictionary

from lockstep.generate.drafts.draft import Draft
from lockstep.generate.sequence import Sequence

BEGIN = -1
"""Precedes each completion; equal to no token."""
PROMPT = 64
"""The bookkeeping of a prompt takes as much memory as this many tokens."""


class SuffixAutomaton:
    """All substrings of some texts, and how often each occurs (Blumer et al. 1985).

    A state is a set of substrings that end at the same positions; following a token from it is one lookup.
    """

    def __init__(self, texts: Iterable[ListLike[int]]):
        self.following: list[dict[int, int]] = [{}]
        self.suffix: list[int] = [-1]
        """The state of the longest suffix that also occurs elsewhere."""
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        for text in texts:
            state = 0
            for token in text:
                state = self._extended(state, token)
                self.count[state] += 1
        # What ends where a longer one does was not counted with it.
        for state in sorted(range(1, len(self.length)), key=self.length.__getitem__, reverse=True):
            self.count[self.suffix[state]] += self.count[state]

    def advanced(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """(state, its length) of the longest suffix of the match so far, and `token`, that occurs in the texts."""
        while token not in self.following[state]:
            if state == 0:
                return 0, 0
            state = self.suffix[state]
            matched = self.length[state]
        return self.following[state][token], matched + 1

    def likeliest(self, state: int) -> int | None:
        """The token that followed most often; None if no text continues."""
        following = self.following[state]
        return max(following, key=lambda token: self.count[following[token]], default=None)

    def _extended(self, last: int, token: int) -> int:
        """The state of the text so far, which is the longest substring of `last`, followed by `token`."""
        known = self.following[last].get(token)
        if known is not None:
            return self._of_length(last, known, token)
        state = self._new_state({}, self.length[last] + 1)
        while last >= 0 and token not in self.following[last]:
            self.following[last][token] = state
            last = self.suffix[last]
        self.suffix[state] = self._of_length(last, self.following[last][token], token) if last >= 0 else 0
        return state

    def _of_length(self, before: int, state: int, token: int) -> int:
        """The part of `state` that is no longer than `before` and `token`: its own state, created if there is none."""
        if self.length[before] + 1 == self.length[state]:
            return state
        part = self._new_state(dict(self.following[state]), self.length[before] + 1)
        self.suffix[part], self.suffix[state] = self.suffix[state], part
        while before >= 0 and self.following[before].get(token) == state:
            self.following[before][token] = part
            before = self.suffix[before]
        return part

    def _new_state(self, following: dict[int, int], length: int) -> int:
        self.following.append(following)
        self.suffix.append(0)
        self.length.append(length)
        self.count.append(0)
        return len(self.length) - 1


class HistoryDraft(Draft):
    """Continues as most of the recent completions of the same prompt did that agree with what was sampled so far.

    It remembers the newest `per_prompt` completions of each prompt, and `capacity` tokens of completions in all, with
    `PROMPT` more per prompt; least recently seen prompts are evicted first. The idea comes from SRT (arXiv 2601.09083)
    and DAS (2511.13841).
    """

    def __init__(self, capacity: int = 1 << 22, per_prompt: int = 16, shortest: int = 2):
        self.capacity, self.per_prompt, self.shortest = capacity, per_prompt, shortest
        self._completions: OrderedDict[bytes, list[array[int]]] = OrderedDict()
        self._size = 0
        self._places: WeakKeyDictionary[Sequence, _Place] = WeakKeyDictionary()
        self._automata: WeakValueDictionary[bytes, SuffixAutomaton] = WeakValueDictionary()
        """Automata of prompts that are being continued; their sequences hold the references."""

    def remember(self, prompt: ListLike[int], completion: ListLike[int]) -> None:
        """Adds a completion, as if it had been sampled here."""
        self._remember(_key(prompt), completion)

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        return [self._propose(sequence, count) for sequence, count in zip(sequences, counts)]

    def ended(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence, None)
        key = place.key if place else _key(sequence.tokens[: sequence.prompt_length])
        if sequence.finish_reason in ("stop", "length"):
            self._remember(key, sequence.tokens[sequence.prompt_length :])

    def _remember(self, key: bytes, completion: ListLike[int]) -> None:
        if key not in self._completions:
            self._completions[key] = []
            self._size += PROMPT
        completions = self._completions[key]
        self._completions.move_to_end(key)
        completions.append(array("i", completion))
        self._size += len(completion)
        if len(completions) > self.per_prompt:
            self._size -= len(completions.pop(0))
        while self._size > self.capacity:
            self._size -= PROMPT + sum(map(len, self._completions.popitem(last=False)[1]))

    def _propose(self, sequence: Sequence, count: int) -> list[int]:
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = _Place(_key(sequence.tokens[: sequence.prompt_length]))
        place.automaton = automaton = place.automaton or self._automaton(place.key)
        if automaton is None:
            return []
        place.follow(automaton, sequence)
        if place.matched < self.shortest and sequence.sampled:
            return []
        proposal: list[int] = []
        state = place.state
        while len(proposal) < count:
            token = automaton.likeliest(state)
            if token is None:
                break
            proposal.append(token)
            state = automaton.following[state][token]
        return proposal

    def _automaton(self, key: bytes) -> SuffixAutomaton | None:
        """Built when the prompt comes again, from what is remembered at that time."""
        automaton = self._automata.get(key)
        if automaton is None and key in self._completions:
            automaton = SuffixAutomaton((BEGIN, *completion) for completion in self._completions[key])
            self._automata[key] = automaton
        return automaton


class _Place:
    """Where in its prompt's automaton a sequence is."""

    def __init__(self, key: bytes):
        self.key = key
        self.automaton: SuffixAutomaton | None = None
        self.state = self.matched = self.read = 0

    def follow(self, automaton: SuffixAutomaton, sequence: Sequence) -> None:
        if not self.read:
            self.state, self.matched = automaton.advanced(0, 0, BEGIN)
            self.read = sequence.prompt_length
        for token in sequence.tokens[self.read :]:
            self.state, self.matched = automaton.advanced(self.state, self.matched, token)
        self.read = len(sequence.tokens)


def _key(prompt: ListLike[int]) -> bytes:
    """A digest: a collision of two prompts would only cause bad guesses."""
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
