"""For all tests: the caller's own settings of Slipstream do not leak in, the folder of fetched models apart."""

import os

for name in [n for n in os.environ if n.startswith("SLIPSTREAM_") and n != "SLIPSTREAM_CACHE"]:
    del os.environ[name]
