"""Grammars that a sample must follow, compiled by llguidance for the tokens of one tokenizer."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data import Tokenizer
from lockstep.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from lockstep.errors import UserError

KEPT = 256
"""Compiled grammars that are kept, the last used ones."""
SECONDS_KEPT = 1.0
"""Processor time that the kept grammars have taken, compilation and masks, which bounds their memory: 60 to 300 MB a
second. The states that a grammar's automaton grows with use are shared by all of its samples."""
LONGEST = 2**18
"""Characters of a grammar."""
FUEL, FREE_FUEL, MOST_STATES = 2**17, 2**14, 2**15
"""Of llguidance: the size of a grammar's automaton at first; that of a regular expression or Lark grammar of a request,
whose memory grows with its square (37 MB at the limit, 2 GB at that of schemas); states, of 1 to 2 kB."""
CANNOT_FOLLOW = "the grammar cannot be followed any more"

SPACES = {"x-guidance": {"whitespace_pattern": r"\x20|\x0A\x20{0,32}", "json_allowed_escapes": 'nrbtf\\"'}}
"""White space in JSON: one space, or a line break and its indentation. With any, a model may write nothing else. With
the escape `\\u`, a model may write the name of a property a second time, with another value."""


def json_grammar(schema: dict[str, Any] | None = None) -> str:
    """The grammar of JSON values that fit a JSON schema; None: of all JSON objects. Raises UserError for what is no
    object."""
    if not isinstance(schema, dict | None):
        raise UserError(f"a JSON schema must be an object, not {schema!r:.60}")
    return json.dumps({"grammars": [{"json_schema": ({"type": "object"} if schema is None else schema) | SPACES}]})


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that a regular expression matches as a whole, in the syntax of Rust's `regex` crate."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: {regex_rule(pattern)}"}]})


def regex_rule(pattern: str) -> str:
    """A regular expression in Lark's syntax."""
    escaped, is_escaped = "", False
    for character in pattern:
        escaped += "\\/" if character == "/" and not is_escaped else "\\n" if character == "\n" else character
        is_escaped = character == "\\" and not is_escaped
    return f"/{escaped}/"


def lark_grammar(text: str) -> str:
    """A grammar in Lark's syntax, as llguidance extends it: `<|name|>` is a special token."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


@contextmanager
def panics_as_errors(problem: str) -> Iterator[None]:
    """Turns exceptions of the library, panics included, which are not `Exception`s, into UserError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {_first_line(str(error)) or type(error).__name__}") from error


@dataclass
class Compiled:
    """A compiled grammar, at its beginning."""

    state: Any
    seconds: float
    """Processor time that it has taken; infinite if it is used up: its copies share limits."""


class Matcher:
    """The state of one sample in its grammar."""

    def __init__(self, compiled: Compiled):
        self._compiled, self._state = compiled, compiled.state.deep_copy()
        self.seconds = 0.0
        """Processor time that the sample has taken so far."""

    def accept(self, token: int) -> bool:
        """Advances; False if the grammar does not allow the token. Raises UserError, as `fill_mask`, if the state
        cannot be computed any more."""
        with self._measured():
            return bool(self._state.consume_token(token))

    def fill_mask(self, bits: np.ndarray) -> None:
        """Sets the bits of the tokens that are allowed next, of a row of int32."""
        with self._measured():
            self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    @property
    def problem(self) -> str:
        """Why the grammar's state cannot be computed any more, on one line; empty if it can."""
        if not self._state.is_error():
            return ""
        return _first_line(str(self._state.get_error())) or CANNOT_FOLLOW

    @contextmanager
    def _measured(self) -> Iterator[None]:
        begin = time.thread_time()
        try:
            with panics_as_errors(CANNOT_FOLLOW):
                yield
        finally:
            seconds = time.thread_time() - begin
            self.seconds += seconds
            self._compiled.seconds += math.inf if self._state.is_error() else seconds


class Grammars:
    """Compiles grammars for a tokenizer. Calls from several threads are safe.

    vocab: rows of the model's head, which may be more than the tokenizer's tokens. end_ids: the tokens that may end a
    sample where its grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Collection[int]):
        self._tokenizer, self._vocab, self._end_ids = tokenizer, vocab, sorted(end_ids)
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._library: Any = None
        self._lock = threading.Lock()

    def compile(self, grammar: str, free: str = "") -> None:
        """Raises UserError for a grammar that is invalid, too large, cannot be satisfied, or has parts that would not
        be enforced. free: a grammar within it that must be smaller, since it can be any automaton."""
        if free and self._kept(grammar) is None:
            self._new(free, FREE_FUEL)
        self._prototype(grammar)

    def matcher(self, grammar: str) -> Matcher:
        """A new state at the beginning of a grammar. Raises UserError as `compile`."""
        return Matcher(self._prototype(grammar))

    def _prototype(self, grammar: str) -> Compiled:
        if (kept := self._kept(grammar)) is not None:
            return kept
        compiled = self._new(grammar, FUEL)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > 1 and (len(self._compiled) > KEPT or self._seconds() > SECONDS_KEPT):
                self._compiled.popitem(last=False)
        return compiled

    def _kept(self, grammar: str) -> Compiled | None:
        """A used-up grammar is compiled again."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None or compiled.seconds > SECONDS_KEPT:
                return None
            self._compiled.move_to_end(grammar)
            return compiled

    def _seconds(self) -> float:
        return sum(compiled.seconds for compiled in self._compiled.values())

    def _new(self, grammar: str, fuel: int) -> Compiled:
        if len(grammar) > LONGEST:
            raise UserError(f"the grammar has {len(grammar)} characters; the limit is {LONGEST}")
        if not self._end_ids:
            raise UserError("a grammar needs a model with an end-of-text token, which ends the sample")
        library = self._of_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=fuel, max_lexer_states=MOST_STATES, verbose_errors=False)
        begin = time.thread_time()
        with panics_as_errors("the grammar cannot be used"):
            state = LLMatcher(library, grammar, log_level=0, limits=limits)
        if state.is_error():
            raise UserError(f"the grammar cannot be used: {_first_line(state.get_error())}")
        if warnings := state.get_grammar_warnings():
            raise UserError(f"the grammar would not be enforced as a whole: {_first_line(warnings[0])}")
        return Compiled(state, time.thread_time() - begin)

    def _of_tokenizer(self) -> Any:
        with self._lock:
            if self._library is None:
                self._library = _open(self._tokenizer, self._vocab, self._end_ids)
            return self._library


def _open(tokenizer: Tokenizer, vocab: int, end_ids: list[int]) -> Any:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise UserError(
            "grammars, JSON schemas and forced tool calls need llguidance, which is missing; pip install llguidance"
        ) from None
    # It refuses tokenizers whose tokens it cannot read as bytes, and panics for some with very long tokens.
    with panics_as_errors("llguidance cannot read this model's tokenizer, so it can follow no grammar"):
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return LLTokenizer(tokenizer.definition(), n_vocab=vocab, eos_token=end_ids)
        assert isinstance(tokenizer, ByteTokenizer)
        return LLTokenizer(TokenizerWrapper(_Bytes(tokenizer, end_ids)), n_vocab=vocab, eos_token=end_ids)


class _Bytes:
    """The byte tokenizer as llguidance reads one."""

    bos_token_id = None

    def __init__(self, tokenizer: ByteTokenizer, end_ids: list[int]):
        self.eos_token_id = end_ids[0]
        names = {number: name.encode() for name, number in tokenizer.special_tokens().items()}
        self.tokens = [bytes([i]) if i < 256 else names.get(i, b"") for i in range(tokenizer.vocab_size)]
        self.special_token_ids = list(names)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:400]
