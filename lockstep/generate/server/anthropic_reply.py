"""Responses of Anthropic's Messages API, whole and as a stream of events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.error_shape import anthropic_error
from lockstep.generate.server.reply import CallPiece, Piece

SIGNATURE = "unsigned"
"""Of reasoning. It is taken back without one; but some clients drop reasoning whose signature is empty."""


@dataclass
class MessageReply:
    """A message: blocks of reasoning, text and calls. A stream has one open block at a time."""

    id: str
    model: str
    request_id: str
    prompt_tokens: int
    fills_context: bool
    """Whether the context ends before the request's `max_tokens`."""
    _blocks: int = field(default=0, init=False)
    """Blocks begun."""
    _open: tuple[str, int] | None = field(default=None, init=False)
    """Type of the open block, and which call it is."""
    _stop: dict[str, Any] = field(default_factory=dict, init=False)

    def answer(self, pieces: list[Piece], usage: dict[str, int]) -> str:
        (piece,) = pieces
        content: list[dict[str, Any]] = []
        if piece.reasoning:
            content.append({"type": "thinking", "thinking": piece.reasoning, "signature": SIGNATURE})
        if piece.text:
            content.append({"type": "text", "text": piece.text})
        # JavaScript has no NaN in JSON, which Python reads.
        content += [
            {**_begun_call(call), "input": json.loads(call.arguments, parse_constant=lambda _: None)}
            for call in piece.calls
        ]
        return json.dumps(self._message(content, self._stop_of(piece), usage["completion_tokens"]))

    def begin(self) -> str:
        return _event("message_start", message=self._message([], {"stop_reason": None, "stop_sequence": None}, 0))

    def shows(self, piece: Piece) -> bool:
        return bool(piece.text or piece.reasoning or piece.calls or piece.finish_reason)

    def chunk(self, piece: Piece) -> str:
        events = ""
        if piece.reasoning:
            events += self._in_block(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            events += self._delta("thinking_delta", thinking=piece.reasoning)
        if piece.text:
            events += self._in_block(("text", 0), {"type": "text", "text": ""})
            events += self._delta("text_delta", text=piece.text)
        for call in piece.calls:
            events += self._in_block(("tool_use", call.index), {**_begun_call(call), "input": {}})
            if call.arguments:
                events += self._delta("input_json_delta", partial_json=call.arguments)
        if piece.finish_reason:
            self._stop = self._stop_of(piece)
        return events

    def end(self, usage: dict[str, int]) -> str:
        delta = _event("message_delta", delta=self._stop, usage=self._usage(usage["completion_tokens"]))
        return self._close() + delta + _event("message_stop")

    def error(self, error: ApiError) -> str:
        return _server_sent("error", anthropic_error(error, self.request_id))

    def _in_block(self, block: tuple[str, int], content_block: dict[str, Any]) -> str:
        """The events after which `block` is the open one."""
        if self._open == block:
            return ""
        closed = self._close()
        self._open = block
        self._blocks += 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=content_block)

    def _delta(self, kind: str, **values: str) -> str:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, **values})

    def _close(self) -> str:
        if self._open is None:
            return ""
        signed = self._delta("signature_delta", signature=SIGNATURE) if self._open[0] == "thinking" else ""
        self._open = None
        return signed + _event("content_block_stop", index=self._blocks - 1)

    def _stop_of(self, piece: Piece) -> dict[str, Any]:
        reason, stop = "end_turn", None
        if piece.finish_reason == "tool_calls":
            reason = "tool_use"
        elif piece.finish_reason == "length":
            reason = "model_context_window_exceeded" if self.fills_context else "max_tokens"
        elif piece.stop_string:
            reason, stop = "stop_sequence", piece.stop_string
        return {"stop_reason": reason, "stop_sequence": stop}

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
        begun = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**begun, **stop, "usage": self._usage(completion_tokens)}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        cached = dict.fromkeys(("cache_creation_input_tokens", "cache_read_input_tokens"), 0)
        return {"input_tokens": self.prompt_tokens, "output_tokens": completion_tokens, **cached}


def _begun_call(call: CallPiece) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _event(kind: str, **values: Any) -> str:
    return _server_sent(kind, {"type": kind, **values})


def _server_sent(kind: str, content: dict[str, Any]) -> str:
    # Anthropic's client drops events without a name.
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"
