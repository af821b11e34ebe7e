"""What every body may hold besides its own fields: one list of what is taken and changes no answer here, for all APIs.

Whatever would change an answer, and is not built, is refused by its name instead. Imports msgspec only.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Absent = Annotated[list[Any], Meta(max_length=0)] | None  # of a field that is not supported: null, an empty list, or left out


class Ignored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of the bodies. A body that has a use for one of these fields declares it again."""

    # the client, and its account
    user: Any = None
    safety_identifier: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    billing_policy: Any = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    store: bool | None = None
    # where and how fast: there is one place and one speed
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    # caching: whatever begins alike is reused without being asked
    cache_control: dict[str, Any] | None = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    diagnostics: Any = None
    # other models for requests that a model declines, and shorter histories: nothing is declined or shortened
    fallbacks: Any = None
    fallback_credit_token: Any = None
    context_management: Any = None
