"""The text of a client secret: how it is made, read from a WebSocket's headers, and checked. Pure."""

import hashlib
import hmac
import re
import time

_FORM = re.compile(r"ek_([0-9a-f]{16})([0-9a-f]{8})([0-9a-f]{32})")  # id, expiry in seconds since 1970, signature
_OFFERED = "openai-insecure-api-key."  # the subprotocol in which a browser, which cannot set headers, sends a key


def signed(id: str, end: int, key: bytes) -> str:
    """id: 16 hexadecimal digits."""
    return f"ek_{id}{end:08x}{_signature(id, end, key)}"


def _signature(id: str, end: int, key: bytes) -> str:
    return hmac.new(key, f"realtime {id} {end}".encode(), hashlib.sha256).hexdigest()[:32]


def is_valid(token: str, key: bytes) -> bool:
    """Whether a server with this key has made the token, and it has not expired."""
    found = _FORM.fullmatch(token)
    if found is None:
        return False
    end = int(found[2], 16)
    return hmac.compare_digest(found[3], _signature(found[1], end, key)) and end > time.time()


def id_of(token: str) -> str:
    """ "" if the text is not a client secret."""
    found = _FORM.fullmatch(token)
    return found[1] if found else ""


def token_of(headers: dict[bytes, bytes]) -> str:
    """The key that a WebSocket's client sends, as a bearer token or as a subprotocol; "" if it sends none."""
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    offered = headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(",")
    return next((p.strip().removeprefix(_OFFERED) for p in offered if p.strip().startswith(_OFFERED)), "")
