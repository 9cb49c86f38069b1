"""One line per event, `key=value`, on standard error."""

import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """`2026-11-30T12:00:00.123Z info gateway request refused reason=patience` and, once, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as one line; extra attributes follow as `key=value`."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [
            f"{stamp}.{int(record.msecs):03d}Z",
            record.levelname.lower(),
            record.name.removeprefix("tokenfleet."),
            record.getMessage(),
        ]
        parts += [
            f"{key}={_quoted(value)}"
            for key, value in record.__dict__.items()
            if key not in _STANDARD and not key.startswith("_")
        ]
        line = " ".join(parts).replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quoted(value: Any) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text


def configure(level: str) -> None:
    """Send all logs to standard error at this level; libraries speak from `warning` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tokenfleet").setLevel(level.upper())
