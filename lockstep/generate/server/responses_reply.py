"""Writes the responses and streams of `/v1/responses`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.data import Tokenizer
from lockstep.data.decoding import token_bytes
from lockstep.data.replies.form import Section
from lockstep.generate.sampling_params import TokenEvent
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.protocol import Message
from lockstep.generate.server.reply import CallPiece, Piece, json_with, server_sent_event, token_entry
from lockstep.generate.server.tool_bodies import CallBody, CalledFunction

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class TextTokens:
    """Which of the sampled tokens the text of the answer is made of, and how many are reasoning.

    A token that completes nothing, such as one with the first bytes of a character, belongs to what the next one
    completes, unless that is structure. Structural and special tokens are no part of a text.
    """

    def __init__(self, tokenizer: Tokenizer, structure: Collection[int]):
        self._tokenizer, self._structure = tokenizer, structure
        self._waiting: list[TokenEvent] = []
        self.reasoning = 0

    def push(self, event: TokenEvent, section: Section) -> list[TokenEvent]:
        """The tokens of the text that this one completes."""
        self._waiting.append(event)
        if section == "structure" and event.token_id not in self._structure:
            return []
        done, self._waiting = self._waiting, []
        if section == "reasoning":
            self.reasoning += len(done)
        return [each for each in done if section == "content" and self._is_text(each.token_id)]

    def _is_text(self, token: int) -> bool:
        return token not in self._structure and token_bytes(self._tokenizer, token) is not None


@dataclass
class OutputItem:
    """An item of the output while it grows."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    text: str = ""
    """Of a call: its arguments."""
    call: CallPiece | None = None
    entries: list[str] = field(default_factory=list)
    """The log-probabilities of the text, JSON."""
    status: Status = "in_progress"

    def part(self) -> str:
        """The only part of its content, as JSON."""
        if self.kind == "reasoning":
            return json.dumps({"type": "reasoning_text", "text": self.text})
        entries = {"logprobs": f"[{', '.join(self.entries)}]"}
        return json_with({"type": "output_text", "text": self.text, "annotations": []}, **entries)

    def written(self, begun: bool = False) -> str:
        """The item as JSON. begun: as a stream first shows it, without content."""
        common = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            call = {"call_id": self.call.id, "name": self.call.name, "arguments": "" if begun else self.text}
            return json.dumps(common | call)
        more: dict[str, Any] = {"role": "assistant"}
        if self.kind == "reasoning":
            more = {"summary": [], "encrypted_content": None}
        return json_with(common | more, content="[]" if begun else f"[{self.part()}]")


PREFIX = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


@dataclass
class ResponsesReply:
    """The response to a request. In a stream, items are completed in the order in which they are sampled."""

    id: str
    created: int
    head: dict[str, str]
    """What the response repeats of the request, as JSON."""
    tokenizer: Tokenizer
    top_logprobs: int | None
    """None: no log-probabilities at all."""
    structure: Collection[int]
    """Tokens that separate the sections of a reply."""
    keep: Callable[[str, Message], None] | None = None
    """Stores the finished response and the message that it is."""
    items: list[OutputItem] = field(default_factory=list)
    _tokens: TextTokens = field(init=False)
    _sequence: int = 0
    _finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._tokens = TextTokens(self.tokenizer, self.structure)

    def answer(self, pieces: list[Piece], usage: dict[str, int]) -> str:
        (piece,) = pieces
        entries = [
            entry
            for event, section in zip(piece.events, piece.sections, strict=True)
            for entry in self._entries(self._tokens.push(event, section))
        ]
        self._finish_reason = piece.finish_reason
        if piece.reasoning:
            self._add("reasoning").text = piece.reasoning
        if piece.text or (not piece.calls and not self._is_cut_in_reasoning()):
            message = self._add("message")
            message.text, message.entries = piece.text, entries
        for call in piece.calls:
            self._add("function_call", call).text = call.arguments
        for item in self.items:
            item.status = "completed"
        return self._finished(usage)

    def begin(self) -> str:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def shows(self, piece: Piece) -> bool:
        return True

    def chunk(self, piece: Piece) -> str:
        self._finish_reason = piece.finish_reason
        tokens = [
            token for event, section in zip(piece.events, piece.sections) for token in self._tokens.push(event, section)
        ]
        events = ""
        if piece.reasoning:
            events += self._continue("reasoning", "reasoning_text", piece.reasoning)
        if piece.text:
            events += self._continue("message", "output_text", piece.text, self._entries(tokens))
        for call in piece.calls:
            events += self._continue("function_call", "function_call_arguments", call.arguments, call=call)
        return events

    def end(self, usage: dict[str, int]) -> str:
        events = ""
        if not any(item.kind != "reasoning" for item in self.items) and not self._is_cut_in_reasoning():
            events = self._continue("message", "output_text", "")
        events += self._close("incomplete" if self._finish_reason == "length" else "completed")
        response = self._finished(usage)
        return events + self._event(f"response.{self._status}", response=response)

    def error(self, error: ApiError) -> str:
        response = self._response("failed", error=json.dumps({"code": "server_error", "message": error.message}))
        return self._event("error", code=error.code, message=error.message, param=error.param) + self._event(
            "response.failed", response=response
        )

    @property
    def _status(self) -> Status:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _is_cut_in_reasoning(self) -> bool:
        return self._finish_reason == "length" and any(item.kind == "reasoning" for item in self.items)

    def _add(self, kind: Literal["reasoning", "message", "function_call"], call: CallPiece | None = None) -> OutputItem:
        self.items.append(OutputItem(kind, PREFIX[kind] + secrets.token_hex(12), call=call))
        return self.items[-1]

    def _entries(self, tokens: list[TokenEvent]) -> list[str]:
        """The log-probabilities of tokens, JSON."""
        if self.top_logprobs is None:
            return []
        return [
            json.dumps(
                token_entry(self.tokenizer, event.token_id, event.logprob)
                | {"top_logprobs": [token_entry(self.tokenizer, *likely) for likely in event.top_logprobs]}
            )
            for event in tokens
        ]

    def _continue(
        self,
        kind: Literal["reasoning", "message", "function_call"],
        event: str,
        text: str,
        entries: list[str] | None = None,
        call: CallPiece | None = None,
    ) -> str:
        """The events of more of an item's text, of a new item if the last one is another."""
        item, events = self.items[-1] if self.items else None, ""
        if item is None or item.kind != kind or (item.call and call and item.call.index != call.index):
            events = self._close("completed")
            item = self._add(kind, call)
            events += self._event("response.output_item.added", self._place(), item=_Json(item.written(begun=True)))
            if call is None:
                events += self._event("response.content_part.added", self._place_in(item), part=_Json(item.part()))
        item.text += text
        item.entries += entries or []
        if not text:
            return events
        place = self._place_in(item)
        more = {"logprobs": _Json(f"[{', '.join(entries or [])}]")} if kind == "message" else {}
        return events + self._event(f"response.{event}.delta", place, delta=text, **more)

    def _close(self, status: Status) -> str:
        """The events of the end of the last item."""
        if not self.items or self.items[-1].status != "in_progress":
            return ""
        item, place = self.items[-1], self._place_in(self.items[-1])
        item.status = status
        match item.kind:
            case "function_call":
                assert item.call is not None
                done = {"arguments": item.text, "name": item.call.name}
                events = self._event("response.function_call_arguments.done", place, **done)
            case "message":
                entries = _Json(f"[{', '.join(item.entries)}]")
                events = self._event("response.output_text.done", place, text=item.text, logprobs=entries)
            case _:
                events = self._event("response.reasoning_text.done", place, text=item.text)
        if item.call is None:
            events += self._event("response.content_part.done", place, part=_Json(item.part()))
        return events + self._event("response.output_item.done", self._place(), item=_Json(item.written()))

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _place_in(self, item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, **self._place(), **({} if item.call else {"content_index": 0})}

    def _event(self, kind: str, place: dict[str, Any] | None = None, **values: Any) -> str:
        """An event. Values that are `_Json` are written as they are."""
        plain = {name: value for name, value in values.items() if not isinstance(value, _Json)}
        written = {name: value for name, value in values.items() if isinstance(value, _Json)}
        self._sequence += 1
        content = {"type": kind, "sequence_number": self._sequence - 1, **(place or {}), **plain}
        return server_sent_event(json_with(content, **written), kind)

    def _finished(self, usage: dict[str, int]) -> str:
        """The finished response, which is stored if it is to be."""
        if self.items:
            self.items[-1].status = self._status
        response = self._response(self._status, usage)
        if self.keep is not None:
            self.keep(response, self._message())
        return response

    def _message(self) -> Message:
        """The response as a message of the history. A call that was cut off is no part of it."""
        calls = [item for item in self.items if item.call is not None and item.status == "completed"]
        texts = {
            kind: "".join(item.text for item in self.items if item.kind == kind) for kind in ("reasoning", "message")
        }
        return Message(
            role="assistant",
            content=texts["message"],
            reasoning_content=texts["reasoning"] or None,
            tool_calls=[
                CallBody(id=item.call.id, function=CalledFunction(name=item.call.name, arguments=item.text))
                for item in calls
                if item.call is not None
            ]
            or None,
        )

    def _response(self, status: Status, usage: dict[str, int] | None = None, error: str = "null") -> _Json:
        ended = status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        values = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if ended else None,
            "status": status,
            "incomplete_details": incomplete,
            "usage": None if usage is None else self._usage(usage),
        }
        output = ", ".join(item.written() for item in self.items if item.status != "in_progress")
        return _Json(json_with(values, error=error, output=f"[{output}]", **self.head))

    def _usage(self, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._tokens.reasoning},
            "total_tokens": usage["total_tokens"],
        }


class _Json(str):
    """A value that is already JSON."""
