"""JSON as models write it in calls: parsed with the reasons why it cannot be, and followed while it grows."""

from __future__ import annotations

import json
import math
import re
from typing import Any

DEEPEST = 32
"""Maximum nesting of objects and lists in a call's arguments."""


class _Refused(ValueError):
    """JSON that Python accepts, but a call does not."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _Refused(f"the key {json.dumps(name[:80])} occurs more than once in an object")
        values[name] = value
    return values


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not a number in JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise _Refused("a number is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_finite)


def read_json(text: str, place: int) -> tuple[Any, int, str]:
    """The JSON value at `place`, after whitespace; where it ends, if known; and what is wrong with it, if anything."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _DECODER.raw_decode(text, place)
    except _Refused as error:
        return None, place, f"the call cannot be read: {error}"
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - place + 1} of it"
        return None, place, f"the call is not valid JSON: {error.msg} {where}"
    except ValueError:  # Python refuses integers of thousands of digits
        return None, place, "the call cannot be read: a number has too many digits"
    except RecursionError:
        return None, place, f"the call is nested deeper than {DEEPEST} levels"
    if _depth(value) > DEEPEST:
        return None, end, f"the call is nested deeper than {DEEPEST} levels"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # "\\ud800" is JSON, but half of a surrogate pair has no UTF-8: no tokenizer or file accepts it.
        return None, end, "a text in the call has half of a surrogate pair (\\ud800 to \\udfff)"
    return value, end, ""


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth


STRUCTURE, IN_STRING = re.compile(r'[{}\[\]"]'), re.compile(r'["\\]')


class GrowingObject:
    """Finds the end of a JSON object of which more and more is known, in time proportional to what is new."""

    def __init__(self) -> None:
        self.ended = False
        self.in_string = False
        self._depth = 0
        self._escaped = False

    def take(self, text: str) -> str:
        """The part of a further `text` that belongs to the object: all of it, or up to the closing brace."""
        place = 0
        while not self.ended and place < len(text):
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            found = (IN_STRING if self.in_string else STRUCTURE).search(text, place)
            if found is None:
                return text
            place = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self.in_string = not self.in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    self.ended = self._depth <= 0
        return text[:place]
