"""Keeps records for a while, in shared memory that every front end of a server maps.

A ring of bytes and a ring of index entries: new data overwrites the oldest, so both are bounded. A record also ends
by age. The memory is anonymous, so nothing is left behind, however the server ends.
"""

import contextlib
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterator
from typing import Literal

import numpy as np

DATA_BYTES = 64 << 20
ENTRIES = 4096
RECORD_BYTES = DATA_BYTES // 16  # the most in one record, so that a few large ones do not push out all others
SECONDS = 3600.0
KEY = re.compile(r"[0-9a-f]{24}")
State = Literal["kept", "marked", "removed", "lost"]

_ENTRY = np.dtype([("key", "S24"), ("begin", "<i8"), ("size", "<i8"), ("time", "<f8"), ("gone", "<i4"), ("flag", "<i4")])
_HEAD = np.dtype([("written", "<i8"), ("records", "<i8")])
_BYTES = _HEAD.itemsize + ENTRIES * _ENTRY.itemsize + DATA_BYTES


class ResponseStore:
    """Keys are 24 hexadecimal digits. The newest record of a key counts. Times are from the clock that all processes share."""

    def __init__(self, fd: int | None = None, seconds: float = SECONDS):
        """fd: a memfd that the processes share; None creates one for this process alone."""
        self._fd = os.memfd_create("slipstream-shelf", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self._fd, _BYTES)  # the same in every process; the kernel adds pages when they are written
        self._map = mmap.mmap(self._fd, _BYTES)
        self._head = np.frombuffer(self._map, _HEAD, 1)
        self._entries = np.frombuffer(self._map, _ENTRY, ENTRIES, _HEAD.itemsize)
        self._data = memoryview(self._map)[_BYTES - DATA_BYTES :]
        self._seconds = seconds

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A lock against other processes; within one, all calls are on the loop's thread. Held while a record is copied."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def put(self, key: str, data: bytes) -> bool:
        """Keeps a record; returns False if it is too large."""
        if len(data) > RECORD_BYTES:
            return False
        with self._locked():
            begin, at = int(self._head["written"][0]), int(self._head["records"][0]) % ENTRIES
            place = begin % DATA_BYTES
            first = min(len(data), DATA_BYTES - place)
            self._data[place : place + first] = data[:first]
            self._data[: len(data) - first] = data[first:]
            old = self._newest(key)
            flag = 0 if old is None else int(self._entries["flag"][old])
            self._entries[at] = (key.encode(), begin, len(data), time.monotonic(), 0, flag)
            self._head["written"][0] = begin + len(data)
            self._head["records"][0] += 1
        return True

    def get(self, key: str) -> bytes | None:
        with self._locked():
            at = self._find(key)
            if at is None:
                return None
            entry = self._entries[at]
            place, size = int(entry["begin"]) % DATA_BYTES, int(entry["size"])
            first = min(size, DATA_BYTES - place)
            return bytes(self._data[place : place + first]) + bytes(self._data[: size - first])

    def remove(self, key: str) -> bool:
        with self._locked():
            at = self._find(key)
            if at is not None:
                self._entries["gone"][at] = 1
            return at is not None

    def mark(self, key: str) -> None:
        """Sets the record's flag; the front end that runs the response checks it."""
        with self._locked():
            at = self._find(key)
            if at is not None:
                self._entries["flag"][at] = 1

    def state(self, key: str) -> State:
        """The state of the record: "lost" if it has expired, was pushed out, or never existed."""
        with self._locked():
            at = self._newest(key)
            if at is None:
                return "lost"
            entry = self._entries[at]
            if entry["gone"]:
                return "removed"
            return "marked" if entry["flag"] else "kept" if self._is_kept(at) else "lost"

    def _newest(self, key: str) -> int | None:
        """The index of the key's newest entry, in whatever state the record is."""
        if not KEY.fullmatch(key):
            return None
        hits = np.flatnonzero(self._entries["key"] == key.encode())
        return int(hits[np.argmax(self._entries["begin"][hits])]) if len(hits) else None

    def _find(self, key: str) -> int | None:
        """The index of the key's record; None if there is none, or it is removed or lost."""
        at = self._newest(key)
        return at if at is not None and not self._entries["gone"][at] and self._is_kept(at) else None

    def _is_kept(self, at: int) -> bool:
        entry = self._entries[at]
        kept = int(self._head["written"][0]) - DATA_BYTES <= int(entry["begin"])
        return kept and time.monotonic() - float(entry["time"]) <= self._seconds
