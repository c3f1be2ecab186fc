"""The text of a sample as it grows. It ends before a stop string, no part of which is ever shown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lockstep.data import StreamDecoder
from lockstep.data.replies import CallPart, Piece, ReplyParts, ReplyReader, reply_form


class StopString:
    """Searches for a stop string in a growing text, in constant time per character (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str):
        self.text = text
        self._shorter = [0]
        """For each number of matched characters, the length of the next shorter match (the KMP failure function)."""
        for character in text[1:]:
            self._shorter.append(self.advance(self._shorter[-1], character))

    def advance(self, matched: int, character: str) -> int:
        """How many characters of the stop string are matched after `character`; `matched`: before it, not all."""
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)


class GrowingText:
    """The content and the reasoning of one sample.

    `stop_ids` are tokens that end it and have no text; `length` counts the characters decoded so far. reader: separates
    content and reasoning; by default in the form that the decoder's vocabulary suggests. A stop string ends the sample
    within reasoning too, as in the engine, but never within the names of channels.

    A `</think>` without `<think>` in the sample or its prompt reveals late that the text before it was reasoning: a
    stream has already shown that as content, `parts` is correct.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        stop: Sequence[StopString],
        stop_ids: Collection[int],
        reader: ReplyReader | None = None,
    ):
        self._reader = reader or ReplyReader(reply_form(decoder.tokenizer), decoder)
        self._stop = stop
        self._matched = [0] * len(stop)
        self._stop_ids = stop_ids
        self._withheld: list[Piece] = []
        self.length = 0
        self.stopped = False
        """A stop string was found."""
        self.stop_string = ""
        """The one that was found."""
        self.reasoning = ""
        """The reasoning that can be shown after the last token."""
        self.calls: list[CallPart] = []
        """The same of calls."""

    def parts(self) -> ReplyParts | None:
        """The parts of the finished sample; None if a stop string ended it: then the pushed texts count."""
        return None if self.stopped else self._reader.parts()

    def push(self, token: int, last: bool) -> str:
        """The content that can be shown after `token`; if it is the last, everything up to the end or the stop string.

        Sets `reasoning` and `calls` to those of this token.
        """
        # Of gpt-oss's end tokens one also ends a call.
        ends = last and token in self._stop_ids and token not in self._reader.form.ids
        new = [] if ends else self._reader.push(token)
        if last:
            new += self._reader.finish()
        self.length += _length(new)
        content = self.reasoning = ""
        self.calls = []
        for piece in self._before_stop(new, last) if self._stop else new:
            if piece.section == "content":
                content += piece.text
            elif piece.section == "reasoning":
                self.reasoning += piece.text
            self.calls += piece.calls
            content += "".join(part.unread for part in piece.calls)
        return content

    def _before_stop(self, new: list[Piece], last: bool) -> list[Piece]:
        """The pieces, withheld and new, that cannot be part of a stop string."""
        if self.stopped:
            return []
        position, self.stop_string = self._stop_position(new)
        self.stopped = position is not None
        # Withholds what may be the beginning of a stop string.
        end = _length(new) - (0 if last else max(self._matched)) if position is None else position
        shown, self._withheld = _split(self._withheld + new, _length(self._withheld) + end)
        return shown

    def _stop_position(self, new: Sequence[Piece]) -> tuple[int | None, str]:
        """Where in the sampled text of `new` the first stop string begins, negative if before it, and which it is."""
        found: list[tuple[int, str]] = []
        begin = 0
        for piece in new:
            if piece.section == "structure":
                self._matched = [0] * len(self._stop)
            elif piece.sampled:
                found += ((begin + place, stop) for place, stop in self._completed_stops(piece.text))
            if found:
                return min(found)
            begin += len(piece.text) if piece.sampled else 0
        return None, ""

    def _completed_stops(self, text: str) -> Iterator[tuple[int, str]]:
        """Where each stop string that `text` completes begins, and the string."""
        for number, stop in enumerate(self._stop):
            for position, character in enumerate(text, 1):
                self._matched[number] = stop.advance(self._matched[number], character)
                if self._matched[number] == len(stop.text):
                    yield position - len(stop.text), stop.text
                    break


def _length(pieces: Sequence[Piece]) -> int:
    return sum([len(piece.text) for piece in pieces if piece.sampled])


def _split(pieces: Sequence[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces of the first `count` sampled characters, and the others."""
    first: list[Piece] = []
    for number, piece in enumerate(pieces):
        if not piece.sampled:
            # Between two texts: shown only together with the second.
            if count == 0:
                return first, list(pieces[number:])
            first.append(piece)
        elif len(piece.text) > count:
            # A call's part is known with the last character.
            begin, rest = piece.text[:count], piece.text[count:]
            return [*first, piece._replace(text=begin, calls=())], [piece._replace(text=rest), *pieces[number + 1 :]]
        else:
            first.append(piece)
            count -= len(piece.text)
    return first, []
