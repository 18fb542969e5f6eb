"""The web application of the viewer: it reads, and changes nothing.

A page may contain what a hostile model wrote, and any page that the browser has open can send
requests here. So: a token (in a cookie after the first visit), a check of the Host header (another
site's name may resolve to this machine), a policy that runs only our own script, and only GET.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from hermes_rl.errors import HermesError, StoreError, UserError
from hermes_rl.network import is_local_name, open_listener
from hermes_rl.viewer.compare import diff_attempts, diff_runs
from hermes_rl.viewer.folder import RunFolder, whole_number

DEFAULT_PORT = 7470
_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/pages.js": ("pages.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/style.css": ("style.css", "text/css"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Scope = dict[str, Any]
App = Callable[..., Awaitable[None]]


def make_app(folder: RunFolder, token: str, port: int, names: tuple[str, ...] = ()) -> App:
    """Create the ASGI application.

    Args:
        token: required with each request.
        port: names the cookie, since cookies are shared by all ports of a host.
        names: further host names under which it may be reached.
    """
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import PlainTextResponse, RedirectResponse, Response

    cookie = f"hermes_rl_view_{port}"

    async def respond(scope: Scope) -> Response:
        parsed = parse_qs(scope["query_string"].decode("latin-1"))
        query = {name: values[-1] for name, values in parsed.items()}
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        if not is_local_name(headers.get("host", ""), names):
            return PlainTextResponse("this host name is not allowed: hermes-rl view --host", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET", 405)
        if scope["path"] == "/" and _equal(query.get("token", ""), token):
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict")
            return response
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if not any(_equal(one, token) for one in (_cookie(headers, cookie), bearer)):
            text = "Open the address that `hermes-rl view` printed: it has the token.\n"
            return PlainTextResponse(text, 401)
        content, kind, status = await run_in_threadpool(_answer, folder, scope["path"], query)
        return Response(content, status, media_type=kind)

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        response = await respond(scope)
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    return app


def _answer(folder: RunFolder, path: str, query: Mapping[str, str]) -> tuple[bytes, str, int]:
    """Content, type and status of a page, an image or data."""
    if path in _FILES:
        name, kind = _FILES[path]
        return (_STATIC / name).read_bytes(), kind, 200
    try:
        if path == "/api/image":
            return *folder.image(*_unit(query), query.get("sub", ""), whole_number(query, "n")), 200
        if path not in _ROUTES:
            raise StoreError(f"no page {path}")
        return encode_answer(_ROUTES[path](folder, query)), "application/json", 200
    except HermesError as error:
        status = 400 if isinstance(error, UserError) else 404
        return encode_answer({"error": str(error)}), "application/json", status
    except Exception as error:  # a damaged run can raise anything
        text = f"this cannot be read: {type(error).__name__}: {error}. See hermes-rl check RUN"
        return encode_answer({"error": text}), "application/json", 500


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _cookie(headers: Mapping[str, str], name: str) -> str:
    pairs = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _unit(query: Mapping[str, str], suffix: str = "") -> tuple[str, str]:
    if suffix and any(name in query and not query.get(name + suffix) for name in ("run", "id")):
        raise UserError("the address has no second part to compare with (run2, id2)")
    return query.get(f"run{suffix}", ""), query.get(f"id{suffix}", "")


def _messages(folder: RunFolder, query: Mapping[str, str]) -> Any:
    start, whole = whole_number(query, "from"), bool(query.get("whole"))
    return folder.messages(*_unit(query), query.get("sub", ""), start, whole)


_ROUTES: dict[str, Callable[[RunFolder, Mapping[str, str]], Any]] = {
    "/api/runs": lambda folder, q: {"folder": str(folder.path.absolute()), "runs": folder.runs()},
    "/api/run": lambda folder, q: folder.run(q.get("run", "")),
    "/api/units": lambda folder, q: folder.units(q.get("run", ""), q),
    "/api/unit": lambda folder, q: folder.unit(*_unit(q), q.get("sub", "")),
    "/api/messages": _messages,
    "/api/groups": lambda folder, q: folder.groups(q.get("run", ""), q),
    "/api/tokens": lambda folder, q: folder.tokens(
        *_unit(q), whole_number(q, "branch"), whole_number(q, "from")
    ),
    "/api/diff/units": lambda folder, q: diff_attempts(
        *(folder.index(_unit(q, side)[0]).row(_unit(q, side)[1]) for side in ("", "2"))
    ),
    "/api/diff/runs": lambda folder, q: diff_runs(
        *(folder.index(_unit(q, side)[0]).run_dir.path for side in ("", "2"))
    ),
}


def encode_answer(value: Any) -> bytes:
    """JSON for a browser: not a number becomes null, and lone surrogates stay as they are."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(_finite(msgspec.to_builtins(value))).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def serve(folder: RunFolder, host: str, port: int | None, opened: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        port: None takes DEFAULT_PORT, or a free one if it is in use.
        opened: called with the address, which has the token, once the port listens.

    Raises: UserError when the address or the port cannot be used.
    """
    try:
        import uvicorn
    except ImportError:
        command = "pip install 'hermes-rl[view]'"
        raise UserError(
            f"the viewer needs uvicorn, which is not installed. Run {command}"
        ) from None
    listener = _listen(host, port)
    number = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    names = () if host in ("", "0.0.0.0", "::") else (host,)
    config = uvicorn.Config(
        make_app(folder, token, number, names), log_level="error", access_log=False, ws="none",
        lifespan="off", timeout_graceful_shutdown=1, server_header=False,
    )  # fmt: skip
    shown = host if names else socket.gethostname()
    opened(f"http://{f'[{shown}]' if ':' in shown else shown}:{number}/?token={token}")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn has shut down and raises the signal again
        pass
    finally:
        folder.close()


def _listen(host: str, port: int | None) -> socket.socket:
    if port is None:
        with suppress(UserError):
            return open_listener(host, DEFAULT_PORT)
    return open_listener(host, port or 0)
