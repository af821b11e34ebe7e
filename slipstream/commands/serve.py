"""`slipstream serve`: reads the configuration, fetches the model, and becomes the supervisor.

This process imports neither PyTorch nor the HTTP stack.
"""

import argparse
import importlib.util
import ipaddress
import os
import sys

from slipstream import config
from slipstream.errors import ConfigError
from slipstream.graph.known import is_composite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=config.EngineConfig.__dataclass_fields__["model"].metadata["help"])
    config.add_flags(parser, config.EngineConfig, config.ServerConfig)


def run(args: argparse.Namespace) -> int:
    engine, server = config.resolve(vars(args), config.EngineConfig, config.ServerConfig)
    _check(engine, server)
    # From here on only `server` holds the key; ranks and front ends must not inherit it.
    os.environ.pop("SLIPSTREAM_API_KEY", None)
    if server.api_key is None and server.uds is None and not _is_loopback(server.host):
        print(
            f"slipstream: warning: --host {server.host} can be reached from other machines, and no --api-key is set",
            file=sys.stderr,
        )
    if is_composite(engine.model):
        from slipstream.graph import launch

        return launch.run(engine, server)
    from slipstream.embed.kinds import encoder_spec
    from slipstream.process.server import serve
    from slipstream.weights.pull import resolve_model

    path = resolve_model(engine.model, weights=engine.load_format != "dummy")
    encoder = encoder_spec(engine, path)
    return serve(engine, server, str(path), encoder=encoder.encoded() if encoder else "")


def _check(engine: config.EngineConfig, server: config.ServerConfig) -> None:
    """What concerns two fields at once."""
    if server.uds is not None and len(os.fsencode(server.uds)) > 107:
        raise ConfigError(f"--uds: the path has {len(os.fsencode(server.uds))} bytes; a Unix socket path may have at most 107")
    if server.otlp_traces_endpoint:
        if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
            raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'slipstream[otel]'")
        if not server.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {server.otlp_traces_endpoint}: expected http://HOST:PORT/v1/traces")
    if engine.chat_template and "{" not in engine.chat_template and not os.path.exists(engine.chat_template):
        raise ConfigError(f"--chat-template: {engine.chat_template} is neither a file nor the text of a template")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
