"""POST /v1/realtime/client_secrets: keys for the WebSocket that expire soon, so that no page or phone needs the server's key.

Each key carries the settings that its sessions begin with. The guard accepts it by its signature (`secret_token.py`).
"""

import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from slipstream.errors import Overloaded
from slipstream.serve.audio.realtime_settings import Settings
from slipstream.serve.audio.secret_token import id_of, signed
from slipstream.serve.front import Front
from slipstream.serve.request_body import read

MAX_SECRETS = 1024  # valid at a time


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = 600


class ClientSecretBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/realtime/client_secrets."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


def settings_of(state: Any, token: str) -> Settings | None:
    """The settings that a client secret's sessions begin with; None for another key. `state`: the application's state."""
    end, settings = _kept(state).get(id_of(token), (0, None))
    return settings if end > time.time() else None


def _kept(state: Any) -> dict[str, tuple[int, Settings]]:
    """The expiry and the settings of each secret, by its id."""
    return state.__dict__.setdefault("client_secrets", {})


async def client_secrets(http: Request) -> Response:
    """POST /v1/realtime/client_secrets."""
    front: Front = http.app.state.front
    body = await read(http, ClientSecretBody)
    settings = Settings(front.model, tuple(front.models)).updated(body.session)
    kept, now = _kept(http.app.state), int(time.time())
    for id in [id for id, (end, _) in kept.items() if end <= now]:
        del kept[id]
    if len(kept) >= MAX_SECRETS:
        raise Overloaded(f"{MAX_SECRETS} client secrets are valid, which is the limit; try again later")
    id, end = secrets.token_hex(8), now + (body.expires_after or ExpiresAfter()).seconds
    kept[id] = (end, settings)
    value = signed(id, end, (front.server_config.api_key or "").encode())
    answer = {"value": value, "expires_at": end, "session": settings.describe()}
    return Response(msgspec.json.encode(answer), media_type="application/json")
