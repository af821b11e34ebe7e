"""Checks before every route: the key, Host and Origin. Adds the request id and the headers that every answer has. Pure ASGI."""

import hmac
import ipaddress
import logging
import re
import secrets
import time
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.config import ServerConfig
from slipstream.serve.audio.secret_token import is_valid, token_of
from slipstream.serve.errors import Failure
from slipstream.serve.observe.http_counts import HttpCounts

log = logging.getLogger("slipstream.http")

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/static/page.js", "/static/voice.js", "/static/page.css"}
)  # the page's files hold no secret; the page asks for the key
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/debug/timeline"})  # probes ask for these all the time; not logged
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_ID = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_SINGLE = (b"host", b"authorization", b"x-api-key", b"origin")
_METHODS = "GET, POST, DELETE"
_FIELDS = re.compile(rb"[A-Za-z0-9\-, ]{0,2000}")  # names of headers
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


def is_loopback(host: str) -> bool:
    """Whether a socket bound to `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Wraps the application.

    On loopback the Host must be a loopback name, so that no other site's name can reach the server, and an Origin must be the
    server's own. Other sites get no CORS headers, so browsers keep their scripts away elsewhere too, but not from WebSockets:
    there an Origin must be the server's own at any address. Sites of --allowed-origins may do what the server's own page may.
    A header that identifies the client may occur once: of two, a proxy could have read the other one.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, counts: HttpCounts | None = None):
        self._app = app
        self._counts = counts
        self._key = config.api_key.encode() if config.api_key else None
        self._loopback = config.uds is None and is_loopback(config.host)
        self._hosts = LOOPBACK | {config.host}
        self._allowed = frozenset(origin.encode() for origin in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "websocket" and self._check(scope, headers) is not None:
            return await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(12)
        scope["slipstream.id"] = request_id
        begun, status = time.monotonic(), 0
        extra = [(b"x-request-id", request_id.encode()), *_HEADERS, *self._cors(headers)]

        async def wrapped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            failure = self._check(scope, headers)
            if failure is not None:
                return await failure.response(scope["path"])(scope, receive, wrapped)
            if self._is_preflight(scope, headers):
                return await _preflight(headers)(scope, receive, wrapped)
            await self._app(scope, receive, wrapped)
        finally:
            path = scope["path"]
            if self._counts is not None:
                self._counts.answered(path, status)
            level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
            if log.isEnabledFor(level):
                took = (time.monotonic() - begun) * 1e3
                log.log(
                    level,
                    "%s %s %d %.0f ms %s",
                    scope["method"],
                    path[:100].encode("unicode_escape").decode(),
                    status,
                    took,
                    request_id,
                )

    def _cors(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """The headers of the Fetch standard by which a browser lets an allowed site's page read the answer, also an error."""
        if not self._allowed:
            return []
        vary, origin = (b"vary", b"Origin"), headers.get(b"origin")
        if origin not in self._allowed:
            return [vary]
        exposed = (b"access-control-expose-headers", b"x-request-id, retry-after, x-should-retry")
        return [vary, (b"access-control-allow-origin", origin), exposed]

    def _is_preflight(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Whether a browser asks if an allowed site's page may send a request. It sends no key with this question."""
        asks = scope["type"] == "http" and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        return asks and headers.get(b"origin") in self._allowed

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> Failure | None:
        names = [name for name, _ in scope["headers"]]
        hosts = names.count(b"host")
        if hosts != 1 and (hosts or scope.get("http_version") != "1.0"):  # RFC 9112, section 3.2
            return Failure(400, f"Host: a request must have exactly one, this one has {hosts}")
        for name in _SINGLE:
            if names.count(name) > 1:
                return Failure(400, f"{name.decode()}: a request may have at most one, this one has {names.count(name)}")
        host = headers.get(b"host", b"").decode("latin-1")
        if self._loopback and hosts and _hostname(f"//{host}") not in self._hosts:  # no browser sends HTTP/1.0; probes do
            return Failure(403, "this server is bound to a loopback address and answers to 127.0.0.1 and localhost only")
        origin = headers.get(b"origin")
        guarded = self._loopback or scope["type"] == "websocket"
        if guarded and origin is not None and origin not in self._allowed and _netloc(origin.decode("latin-1")) != host.lower():
            return Failure(403, "requests from pages of other sites are refused, except those of --allowed-origins")
        path = scope["path"]
        scope["slipstream.authorized"] = self._authorized(headers) or self._has_client_secret(scope, headers)
        if path in OPEN_PATHS or path == "/" or scope["slipstream.authorized"] or self._is_preflight(scope, headers):
            return None
        return Failure(401, "the key is missing or wrong; send the header Authorization: Bearer KEY", code="invalid_api_key")

    def _has_client_secret(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """A client secret is valid for a WebSocket only."""
        return scope["type"] == "websocket" and self._key is not None and is_valid(token_of(headers), self._key)

    def _authorized(self, headers: dict[bytes, bytes]) -> bool:
        if self._key is None:
            return True
        if hmac.compare_digest(headers.get(b"x-api-key", b""), self._key):  # as Anthropic's clients send it
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def _preflight(headers: dict[bytes, bytes]) -> Response:
    """The answer to the browser: allowed. It names the headers asked for, as `*` would not cover Authorization."""
    names = headers.get(b"access-control-request-headers", b"")
    response = Response(status_code=204)
    response.headers["access-control-allow-methods"] = _METHODS
    if _FIELDS.fullmatch(names):
        response.headers["access-control-allow-headers"] = names.decode()
    response.headers["access-control-max-age"] = "600"  # seconds
    return response


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return None
