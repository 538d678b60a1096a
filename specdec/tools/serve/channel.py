"""Messages between an API server and its engine, over a socket that only these two have."""

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

COMPILING = 4  # grammars at once, in either process: hostile ones hold threads for seconds, which others need, too
LENGTH = struct.Struct("<Q")  # of a pickled message, before it


class Channel:
    """One end of the socket, in asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> "Channel":
        """Return the channel over `sock`, which it closes."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, message: Any) -> None:
        """Send what can be pickled; without waiting, and in vain once the other side is gone."""
        self._writer.write(packed(message))

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield messages until the other side is gone."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(length))

    async def close(self) -> None:
        """Let the other side know that this one is gone."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def packed(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def received(sock: socket.socket) -> Any:
    """Return the next message of a socket without an event loop, behind which there is none yet; EOFError if the other
    side is gone."""
    with sock.makefile("rb") as file:
        file.read(LENGTH.size)
        return pickle.load(file)
