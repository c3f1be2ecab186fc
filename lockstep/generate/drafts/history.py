"""Drafts from earlier completions of the same prompt: in reinforcement learning, the policy changes little between
epochs."""

from __future__ import annotations

import hashlib
import heapq
import re
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from lockstep.generate.drafts.draft import Draft
from lockstep.generate.sequence import Sequence

BEGIN = "\U0010ffff"
"""Precedes each completion, and follows the last; not a token of any vocabulary below a million."""
PROMPT = 64
"""Memory overhead per prompt, in tokens."""
BITS = 21
"""Per character."""
LONGEST = 16
"""The longest match that is compared to choose among places, in tokens."""
MOST_PLACES = 16
"""The most matches that are considered, newest first: a frequent trigram of long texts has many."""


class Texts:
    """Completions joined to one string, in which a token is a character, with a sorted index of its trigrams.

    A place is an index of the string, directly after a match; lists of places are ordered newest first.
    """

    def __init__(self, completions: Iterable[str]):
        self.text = BEGIN + "".join(BEGIN + completion for completion in completions) + BEGIN
        self._sorted: tuple[list[int], list[int]] | None = None

    def begins(self) -> list[int]:
        """The place at the beginning of each completion."""
        ends = [begin.end() for begin in re.finditer(BEGIN, self.text)]
        return ends[-2:0:-1]

    def places_after(self, last: str) -> list[int]:
        """The places after the longest suffix of `last` that occurs, of two tokens or more; empty if none does."""
        places: list[int] = []
        if len(last) > 2:
            places = self._places(last[-3:], 1)
        if len(last) > 1 and not places:
            places = self._places("\0" + last[-2:], 1 << BITS)
        common = [self._agreeing(place, last) for place in places]
        longest = max(common, default=0)
        return [place for place, agreeing in zip(places, common) if agreeing == longest]

    def _places(self, trigram: str, several: int) -> list[int]:
        """The places after the trigrams of `several` successive keys, beginning with that of `trigram`."""
        keys, order = self._sorted = self._sorted or self._trigrams()
        key = ord(trigram[2]) << 2 * BITS | ord(trigram[1]) << BITS | ord(trigram[0])
        first = bisect_left(keys, key)
        newest = heapq.nlargest(MOST_PLACES, order[first : bisect_left(keys, key + several, first)])
        return [place + 3 for place in newest]

    def _trigrams(self) -> tuple[list[int], list[int]]:
        """The keys of all trigrams in ascending order, most significant token last, and their positions."""
        codes = np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
        keys = codes[2:] << 2 * BITS | codes[1:-1] << BITS | codes[:-2]
        order = np.argsort(keys)
        return keys[order].tolist(), order.tolist()

    def _agreeing(self, place: int, last: str) -> int:
        """The length of the common suffix of `last` and the text before a place."""
        count, most = 0, min(len(last), place)
        while count < most and self.text[place - 1 - count] == last[-1 - count]:
            count += 1
        return count

    def followed(self, places: ListLike[int], token: str) -> list[int]:
        """The places after `token`, of those that it follows."""
        return [place + 1 for place in places if self.text[place] == token]

    def continued(self, places: ListLike[int], count: int) -> str:
        """Up to `count` tokens, each the one that follows most places so far; among equals, the newest."""
        draft = ""
        while len(places) > 1 and len(draft) < count:
            following = [self.text[place] for place in places]
            likeliest = max(dict.fromkeys(following), key=lambda token: (token != BEGIN, following.count(token)))
            if likeliest == BEGIN:
                return draft
            draft += likeliest
            places = self.followed(places, likeliest)
        return draft + "".join(self.text[place : place + count - len(draft)].split(BEGIN)[0] for place in places[:1])


class HistoryDraft(Draft):
    """Proposes the most frequent continuation among recent completions of the same prompt that match the sequence so
    far.

    It stores the newest `per_prompt` completions of each prompt, at most `capacity` tokens in all, counting `PROMPT`
    more per prompt; least recently seen prompts are evicted first. The idea comes from SRT (arXiv 2601.09083)
    and DAS (2511.13841).
    """

    def __init__(self, capacity: int = 1 << 22, per_prompt: int = 16):
        self.capacity, self.per_prompt = capacity, per_prompt
        self._completions: OrderedDict[bytes, list[str]] = OrderedDict()
        self._size = 0
        self._places: WeakKeyDictionary[Sequence, _Place] = WeakKeyDictionary()
        self._texts: WeakValueDictionary[bytes, Texts] = WeakValueDictionary()
        """The texts of prompts in flight; the references are those of `_Place`."""

    def remember(self, prompt: ListLike[int], completion: ListLike[int]) -> None:
        """Adds a completion that another engine has sampled."""
        self._remember(_key(prompt), _text(completion))

    def propose(self, sequences: ListLike[Sequence], counts: ListLike[int]) -> list[list[int]]:
        return [self._propose(sequence, count) for sequence, count in zip(sequences, counts)]

    def ended(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence, None)
        key = place.key if place else _key(sequence.tokens[: sequence.prompt_length])
        if sequence.finish_reason in ("stop", "length"):
            self._remember(key, _text(sequence.tokens[sequence.prompt_length :]))

    def _remember(self, key: bytes, completion: str) -> None:
        if key not in self._completions:
            self._completions[key] = []
            self._size += PROMPT
        completions = self._completions[key]
        self._completions.move_to_end(key)
        completions.append(completion)
        self._size += len(completion)
        if len(completions) > self.per_prompt:
            self._size -= len(completions.pop(0))
        while self._size > self.capacity:
            self._size -= PROMPT + sum(map(len, self._completions.popitem(last=False)[1]))

    def _propose(self, sequence: Sequence, count: int) -> list[int]:
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = _Place(_key(sequence.tokens[: sequence.prompt_length]))
        place.texts = texts = place.texts or self._texts_of(place.key)
        if texts is None:
            return []
        place.follow(texts, sequence)
        return list(map(ord, texts.continued(place.places, count)))

    def _texts_of(self, key: bytes) -> Texts | None:
        """Built from the stored completions when the prompt recurs."""
        texts = self._texts.get(key)
        if texts is None and key in self._completions:
            texts = self._texts[key] = Texts(self._completions[key])
        return texts


class _Place:
    """A sequence's places in the texts of its prompt."""

    def __init__(self, key: bytes):
        self.key = key
        self.texts: Texts | None = None
        self.places: list[int] = []
        self._last = ""
        self._read = 0

    def follow(self, texts: Texts, sequence: Sequence) -> None:
        if not self._read:
            self._last, self._read = BEGIN, sequence.prompt_length
            self.places = texts.begins()
        new = _text(sequence.tokens[self._read :])
        self._read = len(sequence.tokens)
        self._last = (self._last + new)[-LONGEST:]
        for token in new:
            self.places = texts.followed(self.places, token)
        self.places = self.places or texts.places_after(self._last)


def _text(tokens: Iterable[int]) -> str:
    return "".join(map(chr, tokens))


def _key(prompt: ListLike[int]) -> bytes:
    """A digest: a collision of two prompts only causes bad drafts."""
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
