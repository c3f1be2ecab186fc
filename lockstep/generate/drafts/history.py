"""Drafts from earlier completions of the same prompt: in reinforcement, the policy changes little between epochs."""

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
"""Precedes each completion, and follows the last; equal to no token of a vocabulary below a million."""
PROMPT = 64
"""The bookkeeping of a prompt takes as much memory as this many tokens."""
BITS = 21
"""Of a character."""
LONGEST = 16
"""Tokens before a place that are compared to choose among places."""
MOST_PLACES = 16
"""Places that are found at most, the newest ones: the last tokens may be frequent ones of long texts."""


class Texts:
    """Completions as one text, in which a token is a character, and its trigrams in order.

    A place is an index of the text, after an occurrence of something; places are given newest first.
    """

    def __init__(self, completions: Iterable[str]):
        self.text = BEGIN + "".join(BEGIN + completion for completion in completions) + BEGIN
        self._sorted: tuple[list[int], list[int]] | None = None

    def begins(self) -> list[int]:
        """Of the completions."""
        ends = [begin.end() for begin in re.finditer(BEGIN, self.text)]
        return ends[-2:0:-1]

    def places_after(self, last: str) -> list[int]:
        """After the occurrences of the longest end of `last`, of two tokens or more; none if there is none."""
        places: list[int] = []
        if len(last) > 2:
            places = self._places(last[-3:], 1)
        if len(last) > 1 and not places:
            places = self._places("\0" + last[-2:], 1 << BITS)
        common = [self._agreeing(place, last) for place in places]
        longest = max(common, default=0)
        return [place for place, agreeing in zip(places, common) if agreeing == longest]

    def _places(self, trigram: str, several: int) -> list[int]:
        """After the trigrams of `several` successive keys, the first of which is that of `trigram`."""
        keys, order = self._sorted = self._sorted or self._trigrams()
        key = ord(trigram[2]) << 2 * BITS | ord(trigram[1]) << BITS | ord(trigram[0])
        first = bisect_left(keys, key)
        newest = heapq.nlargest(MOST_PLACES, order[first : bisect_left(keys, key + several, first)])
        return [place + 3 for place in newest]

    def _trigrams(self) -> tuple[list[int], list[int]]:
        """The keys of all trigrams in ascending order, in which the last token counts most, and where they begin."""
        codes = np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
        keys = codes[2:] << 2 * BITS | codes[1:-1] << BITS | codes[:-2]
        order = np.argsort(keys)
        return keys[order].tolist(), order.tolist()

    def _agreeing(self, place: int, last: str) -> int:
        """How many of the tokens before a place are those at the end of `last`."""
        count, most = 0, min(len(last), place)
        while count < most and self.text[place - 1 - count] == last[-1 - count]:
            count += 1
        return count

    def followed(self, places: ListLike[int], token: str) -> list[int]:
        """One further, where that token follows."""
        return [place + 1 for place in places if self.text[place] == token]

    def continued(self, places: ListLike[int], count: int) -> str:
        """Up to `count` tokens: at each place the one that follows most often, and among equals the newest."""
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
    """Continues as most of the recent completions of the same prompt did that agree with what was sampled so far.

    It remembers the newest `per_prompt` completions of each prompt, and `capacity` tokens of completions in all, with
    `PROMPT` more per prompt; least recently seen prompts are evicted first. The idea comes from SRT (arXiv 2601.09083)
    and DAS (2511.13841).
    """

    def __init__(self, capacity: int = 1 << 22, per_prompt: int = 16):
        self.capacity, self.per_prompt = capacity, per_prompt
        self._completions: OrderedDict[bytes, list[str]] = OrderedDict()
        self._size = 0
        self._places: WeakKeyDictionary[Sequence, _Place] = WeakKeyDictionary()
        self._texts: WeakValueDictionary[bytes, Texts] = WeakValueDictionary()
        """Those of prompts that are being continued; their sequences hold the references."""

    def remember(self, prompt: ListLike[int], completion: ListLike[int]) -> None:
        """Adds a completion, as if it had been sampled here."""
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
        """Joined when the prompt comes again, from what is remembered at that time."""
        texts = self._texts.get(key)
        if texts is None and key in self._completions:
            texts = self._texts[key] = Texts(self._completions[key])
        return texts


class _Place:
    """Where in the texts of its prompt a sequence is."""

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
    """A digest: a collision of two prompts would only cause bad drafts."""
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
