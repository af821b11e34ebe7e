"""Reads a running server's routes with the standard library, for `top` and `trace`."""

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

from slipstream.errors import ConfigError, EngineDown

TIMEOUT_SECONDS = 10.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (or SLIPSTREAM_API_KEY)")


class Remote:
    """GET requests to one server. Raises ConfigError for a wrong address or key, EngineDown if there is no answer."""

    def __init__(self, base_url: str, key: str | None):
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {base_url}: expected http://HOST:PORT")
        self.base_url = base_url.rstrip("/")
        self._key = key or os.environ.get("SLIPSTREAM_API_KEY")

    def text(self, path: str) -> str:
        request = urllib.request.Request(self.base_url + path)
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as e:
            if e.code == 401:
                raise ConfigError(f"{self.base_url}: the key is missing or wrong; give --api-key") from None
            if e.code == 404 and path.startswith("/debug"):
                raise ConfigError(f"{self.base_url}{path}: start the server with --enable-debug") from None
            return e.read().decode(errors="replace")
        except (urllib.error.URLError, OSError) as e:
            raise EngineDown(f"{self.base_url} does not answer: {getattr(e, 'reason', e)}") from None

    def json(self, path: str) -> Any:
        return json.loads(self.text(path))

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The samples of /metrics by name without our prefix, each with its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        out: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.text("/metrics")):
            for sample in family.samples:
                out.setdefault(sample.name.removeprefix("slipstream:"), []).append((sample.labels, sample.value))
        return out
