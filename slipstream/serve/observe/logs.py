"""The front end's log lines: for people, or one JSON object each for programs. Neither holds prompts or answers."""

import json
import logging
import time

from slipstream.system.say import write_line


class JsonFormatter(logging.Formatter):
    """`{"time": ISO 8601 UTC, "level", "logger", "message"}`, and `"exception"` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Lines(logging.Handler):
    """Writes to standard error. If that is closed, lines are lost and the front end goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


def set_up(level: str, form: str) -> None:
    """Logs lines of `level` and above to standard error, as "text" or "json"."""
    handler = Lines()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the application logs its errors
    logging.getLogger("asyncio").setLevel(logging.WARNING)
