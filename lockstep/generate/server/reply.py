"""Responses and stream chunks in OpenAI's formats, with token ids and weight versions next to the text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lockstep.data import Tokenizer
from lockstep.data.decoding import token_bytes, token_text
from lockstep.data.replies.form import Section
from lockstep.generate.sampling_params import TokenEvent
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.prompt_logprobs import Echo, prompt_logprobs

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class CallPiece:
    """A part of a tool call: its beginning has the name, later ones more of the arguments' JSON."""

    index: int
    """Which of the choice's calls."""
    id: str
    """The call's, in all of its parts."""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Whole:
    """A finished choice, parsed at once."""

    reasoning: str
    content: str
    calls: list[CallPiece]


@dataclass
class Piece:
    """The output of one step, or of all steps so far, for a choice."""

    index: int
    prompt: int
    """Which of the request's prompts."""
    first: bool = True
    text: str = ""
    events: list[TokenEvent] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where in the text each token begins."""
    sections: list[Section] = field(default_factory=list)
    """What each token has completed a part of; "structure": nothing that is shown."""
    finish_reason: str | None = None
    stop_string: str = ""
    """The stop string that ended the choice; empty if none did."""
    reasoning: str = ""
    """Only in chats."""
    whole: Whole | None = None
    """If it is the last piece of a choice: all of it; None if the pieces count."""
    calls: list[CallPiece] = field(default_factory=list)
    """Parts of tool calls, in order."""

    def add(self, later: Piece) -> None:
        self.text += later.text
        self.reasoning += later.reasoning
        self.events += later.events
        self.offsets += later.offsets
        self.sections += later.sections
        self.calls += later.calls
        self.finish_reason, self.stop_string, self.whole = later.finish_reason, later.stop_string, later.whole

    def complete(self) -> None:
        """Makes a piece of all steps the whole choice: without calls that cannot be parsed, each call as one piece."""
        if self.whole is not None:
            self.text, self.reasoning, self.calls = self.whole.content, self.whole.reasoning, self.whole.calls
        else:
            self.calls = [call for call in _joined(self.calls) if _is_object(call.arguments)]
        if self.finish_reason == "tool_calls" and not self.calls:
            self.finish_reason = "stop"
        elif self.finish_reason == "stop" and self.calls:
            self.finish_reason = "tool_calls"


def _joined(pieces: list[CallPiece]) -> list[CallPiece]:
    joined: dict[int, CallPiece] = {}
    for piece in pieces:
        begun = joined.get(piece.index)
        joined[piece.index] = replace(begun, arguments=begun.arguments + piece.arguments) if begun else piece
    return list(joined.values())


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class ReplyWriter(Protocol):
    """Writes a response in the format of one API. A stream is `begin`, a `chunk` for each piece that it `shows`, and
    `end`, each some server-sent events; one that fails ends with `error`."""

    def answer(self, pieces: list[Piece], usage: dict[str, int]) -> str:
        """The complete response to a request that is not streamed, as JSON. Each choice is one piece."""

    def begin(self) -> str: ...

    def shows(self, piece: Piece) -> bool: ...

    def chunk(self, piece: Piece) -> str: ...

    def end(self, usage: dict[str, int]) -> str: ...

    def error(self, error: ApiError) -> str: ...


@dataclass
class Reply:
    """Responses of `/v1/completions` and `/v1/chat/completions`: what all their objects have in common, and what the
    client has requested."""

    id: str
    created: int
    model: str
    chat: bool
    prompts: list[list[int]]
    tokenizer: Tokenizer
    top_logprobs: int | None
    """None: no log-probabilities at all."""
    token_ids: bool
    with_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    top_of_prompt: int | None = None
    """Of `prompt_logprobs`; None: the response has none."""
    echo: Echo | None = None
    """Of the prompts, which the choices begin with."""
    only_prompt: bool = False
    """Whether the choices end with their prompt: they have no sampled token."""

    def answer(self, pieces: list[Piece], usage: dict[str, int]) -> str:
        """The complete response to a request that is not streamed, as JSON."""
        usage = self._counted(usage)
        written = self._of_prompt(pieces[0]) if self.chat else {}
        return self._object([self._choice(piece, "message") for piece in pieces], False, written=written, usage=usage)

    def begin(self) -> str:
        return ""

    def chunk(self, piece: Piece) -> str:
        more = {"usage": None} if self.with_usage else {}
        return server_sent_event(self._object([self._choice(piece, "delta")], True, piece.first, **more))

    def end(self, usage: dict[str, int]) -> str:
        counted = self._object([], chunk=True, first=False, usage=self._counted(usage)) if self.with_usage else ""
        return (server_sent_event(counted) if counted else "") + DONE

    def error(self, error: ApiError) -> str:
        return server_sent_event(json.dumps(error.body()))

    def _counted(self, usage: dict[str, int]) -> dict[str, int]:
        return usage_of(usage["prompt_tokens"], 0) if self.only_prompt else usage

    def shows(self, piece: Piece) -> bool:
        """Whether a chunk with this piece would contain anything for the client."""
        exact = self.token_ids or self.top_logprobs is not None
        return bool(piece.text or piece.reasoning or piece.calls or piece.finish_reason or (exact and piece.events))

    # JSON is written token by token: json.dumps of a whole response holds the GIL, and so does the garbage collection
    # of hundreds of thousands of objects.

    def _object(
        self, choices: list[str], chunk: bool, first: bool = True, written: dict[str, str] | None = None, **more: Any
    ) -> str:
        """written: further values, as JSON."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        rest = {"id": self.id, "object": kind, "created": self.created, "model": self.model, **more}
        if self.chat and self.token_ids and first:
            rest["prompt_token_ids"] = self.prompts[0]
        return json_with(rest, choices=f"[{', '.join(choices)}]", **(written or {}))

    def _of_prompt(self, piece: Piece) -> dict[str, str]:
        """What a choice, or a chat, has of its prompt's log-probabilities, as JSON."""
        scores = piece.events[0].prompt_scores
        if scores is None or self.top_of_prompt is None:
            return {}

        def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"logprob": _number(logprob), "rank": rank, "decoded_token": self._name(token)}

        return {"prompt_logprobs": prompt_logprobs(scores, self.top_of_prompt, entry)}

    def _choice(self, piece: Piece, holder: str) -> str:
        choice: dict[str, Any] = {"index": piece.index}
        if self.chat:
            choice[holder] = _message(piece, holder == "message")
        else:
            echoed = self.echo.texts[piece.prompt] if self.echo and piece.first else ""
            choice["text"] = echoed + ("" if self.only_prompt else piece.text)
        # The one of a token that is not shown would be left to chance.
        choice["finish_reason"] = "length" if self.only_prompt and piece.finish_reason else piece.finish_reason
        if self.token_ids:
            events = self._shown(piece)
            choice["token_ids"] = [event.token_id for event in events]
            choice["weights_versions"] = [event.weights_version for event in events]
            truncated = [event.truncated_logprob for event in events if event.truncated_logprob is not None]
            if truncated and self.top_logprobs is not None:
                choice["truncated_logprobs"] = truncated
            if any(event.route for event in events):
                choice["routes"] = [event.route for event in events]
            if not self.chat and piece.first:
                choice["prompt_token_ids"] = self.prompts[piece.prompt]
        logprobs = "null"
        if self.top_logprobs is not None:
            logprobs = self._chat_logprobs(piece) if self.chat else self._completion_logprobs(piece)
        return json_with(choice, logprobs=logprobs, **({} if self.chat else self._of_prompt(piece)))

    def _shown(self, piece: Piece) -> list[TokenEvent]:
        return [] if self.only_prompt else piece.events

    def _completion_logprobs(self, piece: Piece) -> str:
        tokens, logprobs, tops, offsets = list[int](), list[float | None](), list[str](), list[int]()
        begin = 0
        if self.echo:
            begin = len(self.echo.texts[piece.prompt])
            scores = piece.events[0].prompt_scores
            if piece.first and scores is not None:
                tokens, logprobs, tops = list(scores.tokens), [None, *map(_number, scores.logprobs)], ["null"]
                places = zip(scores.top_logprobs, tokens[1:], scores.logprobs, strict=True)
                named = (self._by_name(top[: self.top_logprobs], token, logprob) for top, token, logprob in places)
                tops += map(json.dumps, named)
                offsets = self.echo.offsets[piece.prompt]
        events = self._shown(piece)
        tops += (json.dumps(self._by_name(event.top_logprobs, event.token_id, event.logprob)) for event in events)
        lists = {
            "tokens": [self._name(token) for token in (*tokens, *(event.token_id for event in events))],
            "token_logprobs": [*logprobs, *(_number(event.logprob) for event in events)],
            "text_offset": [*offsets, *(begin + offset for offset, _ in zip(piece.offsets, events))],
        }
        return json_with(lists, top_logprobs=f"[{', '.join(tops)}]" if self.top_logprobs else "null")

    def _by_name(self, top: list[tuple[int, float]], chosen: int, logprob: float) -> dict[str, float | None]:
        """The likeliest tokens and the chosen one. Of tokens with equal text, the less likely are named by id."""
        names: dict[str, float | None] = {}
        listed = top if chosen in dict(top) else [*top, (chosen, logprob)]
        for token, logprob in listed:
            name = self._name(token)
            names[f"token_id:{token}" if name in names else name] = _number(logprob)
        return names

    def _chat_logprobs(self, piece: Piece) -> str:
        entries = (
            token_entry(self.tokenizer, event.token_id, event.logprob)
            | {"top_logprobs": [token_entry(self.tokenizer, *likely) for likely in event.top_logprobs]}
            for event in piece.events
        )
        return f'{{"content": [{", ".join(map(json.dumps, entries))}], "refusal": null}}'

    def _name(self, token: int) -> str:
        return token_name(self.tokenizer, token)


def token_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """A token as lists of log-probabilities have it."""
    content = token_bytes(tokenizer, token)
    return {
        "token": token_name(tokenizer, token),
        "logprob": _number(logprob),
        "bytes": None if content is None else list(content),
    }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; `token_id:N` if it has none (special tokens, parts of a character)."""
    return token_text(tokenizer, token) or f"token_id:{token}"


def _message(piece: Piece, whole: bool) -> dict[str, Any]:
    """A chat's message, or a piece of it. `reasoning_content` is the key of DeepSeek and SGLang, which most clients and
    chat templates read; vLLM's is `reasoning`."""
    message: dict[str, Any] = {"role": "assistant"} if piece.first else {}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if whole or piece.text or not (piece.reasoning or piece.calls):
        # As OpenAI's: a message of only calls has no content.
        message["content"] = piece.text or (None if whole and piece.calls else "")
    if piece.calls:
        message["tool_calls"] = [_call(call, whole) for call in piece.calls]
    return message | ({"refusal": None} if whole else {})


def _call(call: CallPiece, whole: bool) -> dict[str, Any]:
    """A call, or a part of it: its id, type and name are only in the first one."""
    function = {"name": call.name} if whole or call.name else {}
    begun = {"id": call.id, "type": "function"} if whole or call.name else {}
    index = {} if whole else {"index": call.index}
    return {**index, **begun, "function": {**function, "arguments": call.arguments}}


def server_sent_event(content: str, name: str = "") -> str:
    """An object in JSON as a server-sent event."""
    return f"event: {name}\ndata: {content}\n\n" if name else f"data: {content}\n\n"


def json_with(values: dict[str, Any], **written: str) -> str:
    """An object in JSON, some values of which are already JSON."""
    more = "".join(f', "{name}": {value}' for name, value in written.items())
    return f"{json.dumps(values)[:-1]}{more}}}"


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _number(logprob: float) -> float | None:
    # JSON has no infinity; null cannot be mistaken for a number.
    return logprob if math.isfinite(logprob) else None
