"""Counts HTTP answers by route and status. A client cannot add label values: what is not known is counted as "other"."""

from collections.abc import Iterator, Sequence

from starlette.routing import BaseRoute, Route

from slipstream.serve.observe.shared_counters import SharedCounters

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 499, 500, 501, 503)
OTHER = "other"


class HttpCounts:
    """The answers of all front ends to requests that reached the application.

    What a connection is refused before that (431, too many connections) is not counted. 499: the client left before the
    answer began.
    """

    def __init__(self, routes: Sequence[BaseRoute], shared_counters: SharedCounters):
        http = [route for route in routes if isinstance(route, Route)]
        self._patterns = [route for route in http if route.param_convertors]
        paths = [*dict.fromkeys(route.path for route in http), OTHER]
        self._cells = {path: shared_counters.cells(len(STATUSES) + 1) for path in paths}
        self._at = {status: i for i, status in enumerate(STATUSES)}

    def answered(self, path: str, status: int) -> None:
        """Counts one answer to a request for `path`; status 0: there was none."""
        self._cells[self._route(path)].own[self._at.get(status or 499, len(STATUSES))] += 1

    def _route(self, path: str) -> str:
        if path in self._cells:
            return path
        return next((route.path for route in self._patterns if route.path_regex.match(path)), OTHER)

    def read(self) -> Iterator[tuple[str, str, float]]:
        """Route, status and count of every pair that has occurred."""
        for path, cells in self._cells.items():
            for status, count in zip((*map(str, STATUSES), OTHER), cells.sums(), strict=True):
                if count:
                    yield path, status, count
