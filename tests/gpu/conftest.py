"""The GPU tests run where a GPU is (`make test-gpu`); elsewhere each is counted as skipped, with the reason."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    here = pytest.mark.skip(reason="no GPU on this machine; run `make test-gpu` on one")
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(here)
