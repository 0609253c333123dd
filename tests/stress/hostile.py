"""Hostile clients: malformed, huge, slow, half-open.

All of them speak TCP by hand, so that they can send what no library would; `flood` opens thousands.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Iterator

from lighthouse.address import Address

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
LIMIT_S = 30.0
AT_A_TIME = 500


def frame(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    """Return an HTTP/2 frame; `length` is the length that it claims, if that is a lie."""
    claimed = len(body) if length is None else length
    return struct.pack(">I", claimed)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def malformed() -> Iterator[bytes]:
    """Yield data that does not belong on any of our ports, or that begins well and goes wrong."""
    dice = random.Random(4)
    begun = PREFACE + SETTINGS
    yield b""
    yield b"\x00"
    yield from (dice.randbytes(size) for size in (1, 9, 24, 100, 5000, 100_000))
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"POST /torchft.LighthouseService/Quorum HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"
    yield b"GET /checkpoint/7/header?wait_ms=0 HTTP/9.9\r\n\r\n"
    yield b"GET /checkpoint/7/header?wait_ms=0 HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n"
    yield b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n"
    yield bytes.fromhex("16030100a5010000a10303") + dice.randbytes(160)  # the hello of TLS
    yield b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"
    yield PREFACE[:10]
    yield PREFACE + b"GET / HTTP/1.1\r\n\r\n"
    yield begun + frame(0, 1, 1, b"data on a stream that is not open")
    yield begun + frame(1, 4, 1, dice.randbytes(50))  # headers that are no HPACK
    yield begun + frame(1, 0, 1, b"\x82") * 3  # headers that never end
    yield begun + frame(9, 0, 1, b"x" * 1000)  # a continuation of nothing
    yield begun + frame(4, 0, 0, b"", length=0xFFFFFF)  # settings of 16 MB
    yield begun + frame(8, 0, 0, struct.pack(">I", 0))  # a window that grows by nothing
    yield begun + frame(8, 0, 0, struct.pack(">I", 2**31 - 1)) * 2  # and one beyond its limit
    yield begun + b"".join(frame(3, 0, stream, bytes(4)) for stream in range(1, 2000, 2))  # resets of nothing
    yield begun + frame(6, 0, 0, bytes(8)) * 2000  # pings
    yield begun + SETTINGS * 2000
    yield begun + frame(2**8 - 1, 255, 2**31 - 1, dice.randbytes(1000))


def send_all_malformed(address: Address) -> None:
    """Send each on a connection of its own, with three endings: closed at once, reset, heard out.

    Raises:
        TimeoutError: the server has not ended one that was half closed.
    """
    for data in malformed():
        for ending in (socket.socket.close, reset, hear_out):
            with connected(address) as client:
                try:
                    client.sendall(data)
                    ending(client)
                except TimeoutError:
                    raise
                except OSError:  # the server closed first
                    continue


def connected(address: Address) -> socket.socket:
    """Return a connection; an operation on it that takes longer than the limit is an error."""
    return socket.create_connection((address.host, address.port), timeout=LIMIT_S)


def reset(client: socket.socket) -> None:
    """Close so that the other side gets a RST in the middle of its work."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def hear_out(client: socket.socket) -> None:
    """Send no more, and wait until the other side ends the connection."""
    client.shutdown(socket.SHUT_WR)
    while client.recv(1 << 16):
        pass


class Trickle:
    """Clients that send one byte at a time, on and on, and read nothing."""

    def __init__(self, address: Address, count: int) -> None:
        texts = [PREFACE + SETTINGS, b"GET /checkpoint/7/header?wait_ms=0 HTTP/1.1\r\nX: " + b"a" * 9999]
        self._clients = [(connected(address), texts[number % 2]) for number in range(count)]
        self._said = 0

    def say_one_byte(self) -> None:
        """Let each client send its next byte, unless the server has closed it."""
        for client, text in self._clients:
            with contextlib.suppress(OSError):
                client.sendall(text[self._said : self._said + 1])
        self._said += 1

    def close(self) -> None:
        for client, _ in self._clients:
            client.close()


async def flood(addresses: list[Address], count: int) -> int:
    """Open connections that come and go, `AT_A_TIME` at once; return how many were accepted."""
    gate = asyncio.Semaphore(AT_A_TIME)
    kinds = list(malformed())[:12]

    async def one(number: int) -> bool:
        address, data = addresses[number % len(addresses)], kinds[number % len(kinds)]
        async with gate:
            try:
                async with asyncio.timeout(LIMIT_S):
                    reader, writer = await asyncio.open_connection(address.host, address.port)
            except OSError:
                return False
            with contextlib.suppress(OSError, TimeoutError):
                writer.write(data[:2000])
                # Some clients hang up before the server answers.
                async with asyncio.timeout(0.05 * (number % 3)):
                    await reader.read(100)
            with contextlib.suppress(OSError):
                if number % 4 == 0:
                    writer.transport.abort()
                else:
                    writer.close()
                    await writer.wait_closed()
            return True

    return sum(await asyncio.gather(*map(one, range(count))))
