"""Messages through a worker's pipe, read without ever waiting for the rest of one.

A worker shares its process with whatever a toggle runs. Something else may write into the pipe, and the worker may stop
in the middle of a message. A message is a mark, the length of its content, and the content; anything else is none.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

MARK = b"lorabench"
HEAD = struct.Struct(f"!{len(MARK)}sQ")
LONGEST = 1 << 30  # bytes; a result of a thousand trials has a few hundred thousand
CHUNK, CHUNKS = 1 << 16, 64  # bytes read at once, and how often before what came is looked at
PATIENCE_S = 5.0  # for the rest of a message, all of which is written at once


class Garbled(Exception):
    """What came through the pipe is no message, or half of one; the text says what was found."""


def send(pipe: Connection, message: Any) -> None:
    """Write one message. Raises OSError where nobody reads any more."""
    content = bytes(ForkingPickler.dumps(message))
    left = memoryview(HEAD.pack(MARK, len(content)) + content)
    while left:
        left = left[os.write(pipe.fileno(), left) :]


class Inbox:
    """The reading end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._held, self._since = bytearray(), time.monotonic()
        os.set_blocking(pipe.fileno(), False)

    def messages(self) -> Iterator[Any]:
        """The messages that lie there whole. Raises Garbled for what is none, and EOFError after the last one, where
        the other end is closed."""
        ended = self._take()
        while (content := self._cut()) is not None:
            try:
                message = ForkingPickler.loads(content)  # pyright: ignore[reportAttributeAccessIssue]
            except Exception as error:
                raise Garbled(f"a message that cannot be read ({type(error).__name__})") from None
            yield message
        if self._held and (ended or time.monotonic() - self._since > PATIENCE_S):
            raise Garbled(f"half a message ({len(self._held)} bytes), and no more")
        if ended:
            raise EOFError

    def _take(self) -> bool:
        """Take in what lies there, for as many chunks as a pipe may hold; whether that was the end."""
        for _ in range(CHUNKS):
            try:
                found = os.read(self.pipe.fileno(), CHUNK)
            except BlockingIOError:
                return False
            if not found:
                return True
            self._held += found
            self._since = time.monotonic()
        return False

    def _cut(self) -> bytes | None:
        """The content of the first message, cut off; None where it is not whole."""
        if not MARK.startswith(begun := bytes(self._held[: len(MARK)])):
            raise Garbled(f"{begun!r}…, which is no message")
        if len(self._held) < HEAD.size:
            return None
        _, length = HEAD.unpack_from(self._held)
        if length > LONGEST:
            raise Garbled(f"a message of {length} bytes, which none can have")
        if len(self._held) < HEAD.size + length:
            return None
        content = bytes(self._held[HEAD.size : HEAD.size + length])
        del self._held[: HEAD.size + length]
        return content
