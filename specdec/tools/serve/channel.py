"""Pickled messages between an API server and its engine, over a socket pair."""

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

COMPILING = 4  # grammars compiled at once, in either process: a hostile one occupies a thread for seconds
LENGTH = struct.Struct("<Q")  # precedes each pickled message


class Channel:
    """One end of the socket, in asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> "Channel":
        """Open a channel over `sock`; the channel closes it."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, message: Any) -> None:
        """Queue a picklable message and return at once; it is dropped if the other side has closed."""
        self._writer.write(packed(message))

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield messages until the other side closes."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(length))

    async def close(self) -> None:
        """Close this end, which ends the other side's iteration."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def packed(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def received(sock: socket.socket) -> Any:
    """Read one message without an event loop; no other may follow it yet. EOFError if the other side has closed."""
    with sock.makefile("rb") as file:
        file.read(LENGTH.size)
        return pickle.load(file)
