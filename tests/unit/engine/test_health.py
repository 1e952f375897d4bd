"""Tests for `answers`: a health check fails only for a server that does not respond."""

import asyncio
import time

import pytest

import megagrpo.engine.http.connections as http_module
from megagrpo.engine.http.connections import Connections, answers

RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def check(serve, between=None) -> list[bool]:
    """The results of two health checks of a server that handles connection number i by `serve(i, reader, writer)`."""
    connections = []

    async def accept(reader, writer):
        connections.append(writer)
        await serve(len(connections) - 1, reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Connections({}, 30.0) as client:
        results = [await answers(client, url)]
        if between:
            between()
        results.append(await answers(client, url))
    for writer in connections:
        writer.close()
    server.close()
    return results


async def respond(reader, writer) -> None:
    if await reader.readuntil(b"\r\n\r\n"):
        writer.write(RESPONSE)
        await writer.drain()


def test_a_connection_that_the_server_closes_while_the_request_comes_fails_no_check():
    async def serve(index, reader, writer):
        if index == 1:  # of the second check: the request is read, then the connection ends
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
        else:
            await respond(reader, writer)

    assert asyncio.run(check(serve)) == [True, True]


def test_a_process_without_cpu_time_blames_no_server(monkeypatch):
    monkeypatch.setattr(http_module, "HEALTH_SECONDS", 0.3)
    stalls = [None]

    async def serve(index, reader, writer):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            if stalls:
                stalls.pop()
                time.sleep(1.5)  # of the whole event loop, the client included
            writer.write(RESPONSE)

    assert asyncio.run(check(serve))[0]


@pytest.mark.parametrize("kind", ["silent", "closes always", "drips"])
def test_a_server_that_does_not_respond_fails_its_check(kind, monkeypatch):
    monkeypatch.setattr(http_module, "HEALTH_SECONDS", 0.3)

    async def serve(index, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if kind == "closes always":
            return writer.close()
        while kind == "drips":
            writer.write(b"x")
            await asyncio.sleep(0.05)
        await asyncio.sleep(5)

    began = time.monotonic()
    assert asyncio.run(check(serve)) == [False, False]
    assert time.monotonic() - began < 4
