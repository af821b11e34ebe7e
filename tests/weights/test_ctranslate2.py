import struct

import numpy as np
import pytest

from slipstream.errors import ModelError
from slipstream.weights.ctranslate2 import CTranslate2File


def string(text):
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def variable(name, kind, array):
    dims = b"".join(struct.pack("<I", n) for n in array.shape)
    return string(name) + struct.pack("<B", array.ndim) + dims + struct.pack("<BI", kind, array.nbytes) + array.tobytes()


def write(path, variables, aliases=(), version=6, count=None):
    body = (
        struct.pack("<I", version) + string("WhisperSpec") + struct.pack("<II", 3, len(variables) if count is None else count)
    )
    body += b"".join(variable(*v) for v in variables) + struct.pack("<I", len(aliases))
    path.write_bytes(body + b"".join(string(a) + string(b) for a, b in aliases))
    return path


def test_every_type_is_read_and_aliases_share_bytes(tmp_path):
    x = np.array([[1.5, -2], [0.25, 3]], np.float32)
    rows = [
        ("f4", 0, x), ("f2", 4, x.astype(np.float16)), ("bf", 5, (x.view(np.uint32) >> 16).astype(np.uint16)),
        ("q", 1, np.array([[100, -50], [8, 96]], np.int8)), ("q_scale", 0, np.array([50, 32], np.float32)),
        ("one", 1, np.array([4, 8], np.int8)), ("one_scale", 0, np.array(4, np.float32)), ("n", 3, np.array(7, np.int32)),
    ]  # fmt: skip
    file = CTranslate2File(write(tmp_path / "model.bin", rows, [("alias", "f2")]))
    for name in ("f4", "f2", "bf", "alias"):
        assert (file.float32(name) == x).all(), name
    assert (file.float32("q") == [[2, -1], [0.25, 3]]).all() and (file.float32("one") == [1, 2]).all()
    assert int(file.raw("n")) == 7 and file.specification == "WhisperSpec"
    with pytest.raises(ModelError, match="no variable nothing"):
        file.raw("nothing")


def test_files_that_are_not_whole_are_refused_by_name(tmp_path):
    good = write(tmp_path / "model.bin", [("a", 0, np.zeros(4, np.float32))])
    whole = good.read_bytes()
    for cut in (0, 3, 10, len(whole) - 20, len(whole) - 2):
        (tmp_path / "cut.bin").write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="cut.bin"):
            CTranslate2File(tmp_path / "cut.bin")
    with pytest.raises(ModelError, match="version 3"):
        CTranslate2File(write(tmp_path / "old.bin", [], version=3))
    with pytest.raises(ModelError, match="unknown type 9"):
        CTranslate2File(write(tmp_path / "odd.bin", [("a", 9, np.zeros(1, np.int8))]))
    with pytest.raises(ModelError, match="No such file"):
        CTranslate2File(tmp_path / "missing.bin")
