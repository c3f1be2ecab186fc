"""Responses that later requests can name, kept in memory within limits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.generate.server.protocol import Message

MOST = 1024
"""Responses."""
MOST_BYTES = 2**26
SECONDS = 3600.0
OF_MESSAGE = 2**12
"""Bytes that a message takes in addition to its texts, at most."""


@dataclass(frozen=True)
class StoredResponse:
    content: str
    """As it was sent, JSON."""
    messages: tuple[Message, ...]
    """The conversation up to and including the response, without instructions."""
    bytes: int
    """Most of the memory that it takes: each response of a conversation counts all of its messages."""
    stored: float


class StoredResponses:
    """The last responses; the oldest ones give way. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: dict[str, StoredResponse] = {}
        """In the order in which they were stored."""
        self._bytes = 0

    def get(self, response_id: str) -> StoredResponse | None:
        with self._lock:
            self._drop_old()
            return self._stored.get(response_id)

    def put(self, response_id: str, content: str, messages: tuple[Message, ...]) -> None:
        size = sys.getsizeof(content) + sum(map(_size, messages))
        with self._lock:
            self._stored[response_id] = StoredResponse(content, messages, size, self._clock())
            self._bytes += size
            self._drop_old()

    def delete(self, response_id: str) -> bool:
        """Whether there was one."""
        with self._lock:
            self._drop_old()
            return self._drop(response_id)

    def _drop_old(self) -> None:
        oldest = self._clock() - SECONDS
        while self._stored:
            response_id, response = next(iter(self._stored.items()))
            if response.stored >= oldest and self._bytes <= MOST_BYTES and len(self._stored) <= MOST:
                break
            self._drop(response_id)

    def _drop(self, response_id: str) -> bool:
        response = self._stored.pop(response_id, None)
        self._bytes -= response.bytes if response else 0
        return response is not None


def _size(message: Message) -> int:
    calls = message.tool_calls or ()
    texts = [message.content, message.reasoning_content, *(str(call.function.arguments) for call in calls)]
    return OF_MESSAGE * (1 + len(calls)) + sum(sys.getsizeof(text) for text in texts if text is not None)
