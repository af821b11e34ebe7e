"""Fields that every body may hold besides its own, for all APIs. They are accepted and change no answer here.
A field that would change an answer, and is not built, is refused by its name instead. Imports msgspec only.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Absent = Annotated[list[Any], Meta(max_length=0)] | None  # a field that is not supported: null, an empty list, or left out


class Ignored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of the bodies. A body that has a use for one of these fields declares it again."""

    # names the client and its account
    user: Any = None
    safety_identifier: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    billing_policy: Any = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    store: bool | None = None
    # chooses a place and a speed: there is one of each
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    # caching: equal beginnings are reused without being asked
    cache_control: dict[str, Any] | None = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    diagnostics: Any = None
    # other models for declined requests, and shorter histories: no request is declined and no history shortened
    fallbacks: Any = None
    fallback_credit_token: Any = None
    context_management: Any = None
