"""`slipstream serve` with `bad_worker` in place of the production worker. All else is the production server."""

import argparse
import functools
import os
import sys

from slipstream import config
from slipstream.commands import serve
from slipstream.process import server as production


def main() -> int:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    engine, server = config.resolve(vars(parser.parse_args()), config.EngineConfig, config.ServerConfig)
    os.environ.setdefault("FAULT_FILE", os.path.join(os.environ["SLIPSTREAM_CACHE"], "fault.json"))
    production.Spec = functools.partial(production.Spec, module="tests.faults.bad_worker")  # type: ignore[misc]
    return production.serve(engine, server, engine.model)


if __name__ == "__main__":
    sys.exit(main())
