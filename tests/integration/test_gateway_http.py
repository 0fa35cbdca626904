"""What is not HTTP, or HTTP that no route sees, is answered in the API's error shape and leaves no traceback in the log."""

import asyncio
import gzip
import json
import logging

import pytest

from tests.integration.gateway_bench import Bench
from tests.integration.stub_scheduler import Play

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SQUEEZED = gzip.compress(b'{"prompt":"x"}')
ENCODING = "unsupported_content_encoding"
CASES: dict[str, tuple[bytes, int, str]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01hello\r\n\r\n", 400, "invalid_http"),
    "no request line": (b"HELLO\r\n\r\n", 400, "invalid_http"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
    "version": (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", 400, "invalid_http"),
    "unknown method": (b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
    "other method": (b"PATCH /health HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
    "path": (b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n", 404, "not_found"),
    "URL": (b"GET http://[::bad/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
    "header": (GET + b"bad header\r\n\r\n", 400, "invalid_http"),
    "NUL": (GET + b"A: b\0c\r\n\r\n", 400, "invalid_http"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "long header": (GET + b"A: " + b"a" * 9000 + b"\r\n\r\n", 431, "header_too_large"),
    "long path": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "header_too_large"),
    "many headers": (GET + b"".join(b"a%d: b\r\n" % at for at in range(5000)) + b"\r\n", 400, "invalid_http"),
    "expect": (POST + b"Expect: 200-ok\r\nContent-Length: 2\r\n\r\n{}", 417, "expectation_failed"),
    "length": (POST + b"Content-Length: -3\r\n\r\n", 400, "invalid_http"),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", 400, "invalid_http"),
    "length and chunks": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_http"),
    "chunk": (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", 400, "invalid_http"),
    "gzip": (POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(SQUEEZED) + SQUEEZED, 415, ENCODING),
    "no gzip": (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415, ENCODING),
    "encoding": (POST + b"Content-Encoding: rot13\r\nContent-Length: 2\r\n\r\n{}", 415, ENCODING),
}  # fmt: skip


async def check(bench: Bench, data: bytes, status: int, code: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(data)
    async with asyncio.timeout(5):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
        error = json.loads(await reader.readexactly(length))["error"]
    writer.close()
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 400
    assert (int(head.split()[1]), error["code"]) == (status, code)
    assert "content-type: application/json" in head.lower() and "x-request-id: req-" in head.lower()


async def test_what_is_not_http_gets_our_error_shape(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for name, (data, status, code) in CASES.items():
        try:
            await check(bench, data, status, code)
        except Exception as error:
            raise AssertionError(name) from error
    assert [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


async def test_a_100_continue_is_given(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 29\r\n\r\n")
    async with asyncio.timeout(5):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"prompt":"x","max_tokens":1}')
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_connection_close_is_kept_after_a_stream(bench: Bench) -> None:
    bench.stub.plays = [Play(bench.ids("ok"))]
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    body = b'{"prompt":"x","stream":true}'
    writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(5):
        answer = await reader.read()  # to the end of the connection
    assert b"connection: close" in answer.lower() and b"[DONE]" in answer and answer.endswith(b"0\r\n\r\n")
    writer.close()
