"""Two pipes to a process that is not trusted: frames out, frames in, and somebody watching while one waits.

What comes in may have been written by anyone in that process. It is read as JSON and raw numbers, and only so much.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any

from .child import DTYPES, LENGTH, Arrays, stored_dtype, unpack

HEADER_BYTES = 64 * 1024
MOST_ARRAYS = 8
POLL_MILLISECONDS = 4
NO_ANSWER = "The process wrote something that is no answer"
GONE = "The process ended"


class Channel:
    """The file descriptors `requests` and `replies`; `watch` is called every few milliseconds, and may raise."""

    def __init__(self, requests: int, replies: int, watch: Callable[[], None]) -> None:
        self._requests, self._replies, self._watch = requests, replies, watch
        os.set_blocking(requests, False)
        os.set_blocking(replies, False)

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._replies)

    def send(self, frame: bytes) -> None:
        """Write all of it.

        Raises:
            EOFError: nobody reads any more.
        """
        rest = memoryview(frame)
        for _ in self._ready(self._requests, select.POLLOUT):
            try:
                rest = rest[os.write(self._requests, rest) :]
            except BrokenPipeError:
                raise EOFError(GONE) from None
            if not rest:
                return

    def receive(self, most_bytes: int) -> tuple[dict[str, Any], Arrays]:
        """One frame, of no more than `most_bytes` in arrays.

        Raises:
            EOFError: nobody writes any more.
            ValueError: it is no frame, or too large.
        """
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > HEADER_BYTES:
            raise ValueError(NO_ANSWER)
        head = self._read(length)
        try:
            _check(json.loads(head), most_bytes)
            return unpack(head, self._read)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(NO_ANSWER) from None

    def _read(self, count: int) -> bytes:
        received = bytearray()
        if not count:
            return b""
        for _ in self._ready(self._replies, select.POLLIN):
            part = os.read(self._replies, min(count - len(received), 2**20))
            if not part:
                raise EOFError(GONE)
            received += part
            if len(received) == count:
                break
        return bytes(received)

    def _ready(self, descriptor: int, event: int) -> Any:
        """Comes back each time that the pipe can be written to or read from."""
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            ready = poll.poll(POLL_MILLISECONDS)
            self._watch()
            if ready:
                yield


def _check(header: Any, most_bytes: int) -> None:
    """Raises ValueError, TypeError or KeyError unless the arrays to come are few, of known dtypes, and small."""
    if not isinstance(header, dict) or not isinstance(header["arrays"], list) or len(header["arrays"]) > MOST_ARRAYS:
        raise ValueError
    total = 0
    for described in header["arrays"]:
        if described["dtype"] not in DTYPES or len(described["shape"]) > 4:
            raise ValueError
        size = stored_dtype(described["dtype"]).itemsize
        for length in described["shape"]:
            if type(length) is not int or not 0 <= length < 2**40:
                raise ValueError
            size *= length
        total += size
    if total > most_bytes:
        raise ValueError
