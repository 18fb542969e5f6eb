"""Below HTTP: what carries an answer may be slow, odd or not to be trusted."""

import asyncio
import contextlib
import json
import ssl
import traceback
from base64 import b64encode
from pathlib import Path

import pytest
from simulated_time import with_sockets

from hermes_rl import errors as e
from hermes_rl.models import Endpoint, Timeouts, connect
from hermes_rl.models.providers import list_models
from hermes_rl.testing import FakeConfig, FakeServer

TLS = Path(__file__).parent / "tls"  # a key that protects nothing; valid for 127.0.0.1
ANSWER = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}).encode()
TRANSPORTS = pytest.mark.parametrize("transport", ["http", "sdk"])


@contextlib.asynccontextmanager
async def serving(*pieces, pause=0.0, tls=None):
    """A server that answers every request with these bytes, then hangs up; yields its address."""

    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(length or 0))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1"


async def ask(kit, url, transport, *, stream=False, **options):
    client = connect(Endpoint(url, transport=transport, **options))
    try:
        return await client.complete(kit.request(stream=stream))
    finally:
        await client.aclose()


def head(*lines, version="1.1"):
    first = f"HTTP/{version} 200 OK", "content-type: application/json"
    return "\r\n".join((*first, *lines, "", "")).encode()


@TRANSPORTS
@with_sockets
async def test_slow_answer_is_read_while_it_makes_progress(kit, transport):
    """There is no limit on the whole call."""
    pieces = [head(f"content-length: {len(ANSWER)}"), ANSWER[:9], ANSWER[9:40], ANSWER[40:]]
    async with serving(*pieces, pause=1.0) as url:
        patience = Timeouts(first_byte_s=1.5, idle_s=1.5)
        answer = await ask(kit, url, transport, timeouts=patience)
        assert asyncio.get_running_loop().time() >= 3.0
    assert answer.message.content == "hi"


@TRANSPORTS
async def test_answer_may_end_with_its_connection(kit, transport):
    async with serving(head(version="1.0"), ANSWER) as url:
        assert (await ask(kit, url, transport)).message.content == "hi"


@TRANSPORTS
async def test_server_that_closes_after_a_stream_loses_no_call(kit, transport):
    """As llama.cpp does; the next request comes at once."""
    events = kit.stream_of({"content": "hi"})
    lines = "content-type: text/event-stream", "transfer-encoding: chunked"
    start = "\r\n".join(("HTTP/1.1 200 OK", *lines, "", "")).encode()
    async with serving(start, b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)) as url:
        client = connect(Endpoint(url, transport=transport))
        answers = [await client.complete(kit.request(stream=True)) for _ in range(50)]
        await client.aclose()
    assert {answer.message.content for answer in answers} == {"hi"}


@TRANSPORTS
@pytest.mark.parametrize("stream", [False, True])
async def test_connections_are_reused_after_streams(kit, transport, stream, monkeypatch):
    """Also where a stream ends a moment after the event that completes it."""
    for name, value in {"DRAIN_S": 30.0, "_IDLE_S": {"plain": 60.0}}.items():
        monkeypatch.setattr(f"hermes_rl.models.transports.http.{name}", value)  # a busy machine
    ports, events = set(), kit.stream_of({"content": "hi"})
    lines = "content-type: text/event-stream", "transfer-encoding: chunked"
    start = "\r\n".join(("HTTP/1.1 200 OK", *lines, "", "")).encode()

    async def handle(reader, writer):
        ports.add(writer.get_extra_info("peername"))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head_of := await reader.readuntil(b"\r\n\r\n"):
                length = head_of.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                await reader.readexactly(int(length))
                if not stream:
                    writer.write(head(f"content-length: {len(ANSWER)}") + ANSWER)
                    continue
                writer.write(start + b"%x\r\n%b\r\n" % (len(events), events))
                await asyncio.sleep(0.02)
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = connect(Endpoint(f"http://127.0.0.1:{port}/v1", transport=transport))
        for _ in range(5):
            await client.complete(kit.request(stream=stream))
        await client.aclose()
    assert len(ports) == 1


@TRANSPORTS
@pytest.mark.parametrize("reply", [b"", b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"HTTP/1.1 2"])
async def test_invalid_http_is_a_lost_connection(kit, transport, reply):
    async with serving(reply) as url:
        with pytest.raises(e.ConnectionLost, match="broke off") as caught:
            await ask(kit, url, transport)
    assert caught.value.served is True


@TRANSPORTS
async def test_web_page_in_place_of_an_answer_is_an_outage(kit, transport):
    """A proxy's login page: the run waits and is parked, its units are not given up."""
    page = b"<html><title>Sign in</title></html>"
    kind = "content-type: text/html; charset=utf-8"
    reply = f"HTTP/1.1 200 OK\r\n{kind}\r\ncontent-length: {len(page)}\r\n\r\n".encode() + page
    async with serving(reply) as url:
        with pytest.raises(e.ServerError, match="a web page") as caught:
            await ask(kit, url, transport)
    assert caught.value.served is False


@TRANSPORTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text", [b"upstream connect error", b"\n ok", b"\x1f\x8b\x08\x00", b"", b"7"]
)
async def test_plain_text_in_place_of_an_answer_is_an_outage(kit, transport, stream, text):
    """A gateway's: tried again for as long as an outage may last, and maybe billed."""
    async with serving(head(f"content-length: {len(text)}"), text) as url:
        with pytest.raises(e.ServerError, match="in place of an answer") as caught:
            await ask(kit, url, transport, stream=stream)
    assert caught.value.served is True
    assert caught.value.status == 200


@TRANSPORTS
@pytest.mark.parametrize("text", [b'{"choices": [', b"[]", b'  {"choices": 3}', b"\xef\xbb\xbf{}"])
async def test_malformed_answer_is_a_protocol_error(kit, transport, text):
    async with serving(head(f"content-length: {len(text)}"), text) as url:
        with pytest.raises(e.ProtocolError):
            await ask(kit, url, transport)


@TRANSPORTS
async def test_refusal_with_truncated_body_keeps_its_type(kit, transport):
    cut = b'HTTP/1.1 401 x\r\ncontent-length: 900\r\n\r\n{"error": '
    # The package reads that body itself, and loses the status when it breaks off.
    kind = e.AuthError if transport == "http" else e.ProtocolError
    async with serving(cut) as url:
        with pytest.raises(kind):
            await ask(kit, url, transport)


@TRANSPORTS
async def test_redirects_are_not_followed(kit, transport):
    """A key must not travel to where a server points."""
    moved = b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:9/v1\r\ncontent-length: 0\r\n\r\n"
    async with serving(moved) as url:
        with pytest.raises(e.ModelNotFound, match=r"redirected to http://127\.0\.0\.1:9/v1: use"):
            await ask(kit, url, transport)


@pytest.mark.parametrize(
    "body",
    [
        '{"detail":"Not Found"}',
        '{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
        "404 page not found",
        "",
        '{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","code":404}}',
    ],
)
async def test_missing_route_below_an_address_without_version_is_explained(kit, body):
    reply = f"HTTP/1.1 404 x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    async with serving(reply) as url:
        for base in (url, url.removesuffix("/v1")):
            with pytest.raises(e.ModelNotFound) as raised:
                await ask(kit, base, "http")
            explained = "base_url does not end with /v1" in str(raised.value)
            assert explained is (base != url and "model" not in body), str(raised.value)


@TRANSPORTS
async def test_key_echoed_by_a_server_is_scrubbed(kit, transport):
    key = "canary+key/0123456789"
    message = json.dumps({"error": {"message": f"bad {key} ({b64encode(key.encode()).decode()})"}})
    reply = f"HTTP/1.1 400 x\r\ncontent-length: {len(message)}\r\n\r\n{message}".encode()
    events = kit.Events()
    async with serving(reply) as url:
        client = connect(Endpoint(url, api_key=key, transport=transport))
        with pytest.raises(e.BadRequest, match=r"400: bad \*\*\* \(\*\*\*\)$") as caught:
            await kit.caller(client, events).call(kit.request(), turn=1)
        await client.aclose()
    shown = "".join(traceback.format_exception(caught.value)) + repr(events.all) + repr(client)
    assert key not in shown
    assert "Y2FuYXJ5" not in shown  # its beginning in base64


@TRANSPORTS
async def test_certificates_are_checked(kit, transport):
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    pieces = (head(f"content-length: {len(ANSWER)}"), ANSWER)
    async with serving(*pieces, tls=server_side) as url:
        with pytest.raises(e.AuthError, match=r"cannot trust 127\.0\.0\.1.*Set endpoint\.ca_file"):
            await ask(kit, url, transport)
        known = await ask(kit, url, transport, ca_file=str(TLS / "cert.pem"))
    assert known.message.content == "hi"


@TRANSPORTS
async def test_proxy_variables_of_the_environment_are_ignored(kit, transport, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with FakeServer() as server:
        assert await ask(kit, server.base_url, transport)
        with pytest.raises(e.ConnectionLost):
            await ask(kit, server.base_url, transport, proxy="http://127.0.0.1:9")


async def test_list_models_makes_no_model_call():
    async with FakeServer(FakeConfig(key="k-right", models=("a", "b"))) as server:
        found = await list_models(Endpoint(server.base_url, api_key="k-right"))
    assert found == ("a", "b")
    assert server.requests == 0


async def test_list_models_reports_an_unreachable_endpoint():
    with pytest.raises(e.Outage, match=r"^127\.0\.0\.1:1: .*Start the server"):
        await list_models(Endpoint("http://127.0.0.1:1/v1"))
    with pytest.raises(e.UserError, match=r"Use for example http"):
        await list_models(Endpoint("nowhere"))


async def test_list_models_raises_for_a_refused_key():
    async with FakeServer(FakeConfig(key="k-right")) as server:
        with pytest.raises(e.AuthError, match="401") as caught:
            await list_models(Endpoint(server.base_url, api_key="k-wrong-one"))
    assert "k-wrong-one" not in str(caught.value)


PAGE = b"<html>Error 1015 You are being rate limited</html>"


@pytest.mark.parametrize(
    ("status", "body", "models"),
    [
        (b"404 x", b"", None),
        (b"200 OK", b"hi", None),
        (b"200 OK", b'{"data": []}', ()),
        (b"403 x", PAGE, None),  # no refused key: it does not keep a run from starting
    ],
)
async def test_list_models_accepts_endpoints_without_a_list(status, body, models):
    reply = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
    async with serving(reply) as url:
        assert (await list_models(Endpoint(url))) == models


async def test_list_models_is_limited_in_time():
    async with serving(b"", pause=60) as url:
        with pytest.raises(e.Outage, match=r"no answer within 0\.2 s"):
            await list_models(Endpoint(url), seconds=0.2)


@TRANSPORTS
async def test_endless_answer_is_cut_at_its_maximum_size(kit, transport):
    pieces = [head("transfer-encoding: chunked")] + [b"400\r\n" + b" " * 1024 + b"\r\n"] * 2_000
    async with serving(*pieces) as url:
        with pytest.raises(e.ProtocolError, match="over 100000 bytes") as caught:
            await ask(kit, url, transport, answer_bytes=100_000)
    assert caught.value.served


@TRANSPORTS
async def test_invalid_header_bytes_can_be_recorded(kit, transport):
    odd = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: r\xff1\r\n"
    async with serving(odd + b"content-length: %d\r\n\r\n" % len(ANSWER) + ANSWER) as url:
        answer = await ask(kit, url, transport)
    assert answer.message.content == "hi"
    assert answer.request_id.encode()
