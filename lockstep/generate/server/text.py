"""The growing text of sampled tokens, which ends before a stop string; no part of the stop string is ever shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lockstep.data import StreamDecoder


class StopString:
    """Searches for itself in a growing text, in time independent of its own length (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str):
        self.text = text
        self._shorter = [0]
        """For each number of matched characters, the length of the next shorter match (the KMP failure function)."""
        for character in text[1:]:
            self._shorter.append(self.advance(self._shorter[-1], character))

    def advance(self, matched: int, character: str) -> int:
        """How many of its first characters the text ends with after `character`; `matched`: before it, not all."""
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)


class GrowingText:
    """The text of one sample.

    `stop_ids` are tokens that end it and have no text; `length` counts the characters decoded so far.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[StopString], stop_ids: Collection[int]):
        self._decoder = decoder
        self._stop = stop
        self._matched = [0] * len(stop)
        self._stop_ids = stop_ids
        self._held = ""
        self.length = 0
        self.stopped = False
        """A stop string was found."""

    def push(self, token: int, last: bool) -> str:
        """The text that can be shown after `token`; if it is the last, everything up to the end or the stop string."""
        new = "" if last and token in self._stop_ids else self._decoder.push(token)
        if last:
            new += self._decoder.finish()
        self.length += len(new)
        if self.stopped:
            return ""
        text = self._held + new
        found = self._found(new)
        self.stopped = found is not None
        # What is held back may turn out to be the beginning of a stop string.
        shown = len(text) - (0 if last else max(self._matched, default=0)) if found is None else len(self._held) + found
        self._held = text[shown:]
        return text[:shown]

    def _found(self, new: str) -> int | None:
        """Where in `new` the first stop string begins, negative if before it."""
        found = []
        for number, stop in enumerate(self._stop):
            for position, character in enumerate(new, 1):
                self._matched[number] = stop.advance(self._matched[number], character)
                if self._matched[number] == len(stop.text):
                    found.append(position - len(stop.text))
                    break
        return min(found, default=None)
