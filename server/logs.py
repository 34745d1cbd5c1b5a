"""The log: the standard library's, as text for people or as one JSON object a line, with the request id everywhere.

A library for structured logs would bring nothing that these two formatters lack. Nothing here logs by itself.
"""

import contextvars
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import orjson

Format = Literal["text", "json"]

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")  # of the work going on


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record, and to those of libraries too; "" outside requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = REQUEST_ID.get()
        return True


class TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO verdraft.server: request 'label': what happened, name='value'"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s%(shown)s")

    def format(self, record: logging.LogRecord) -> str:
        label = getattr(record, "request_id", "")
        record.request = f"request {label!r}: " if label else ""
        record.shown = "".join(f", {name}={value!r}" for name, value in getattr(record, "fields", {}).items())
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One object a line. A record's `fields` (logging's `extra`) are members of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if label := getattr(record, "request_id", ""):
            line["request_id"] = label
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line | getattr(record, "fields", {}), default=str).decode()


def set_up_logs(level: str, format: Format) -> None:
    """Everything goes to stderr; chatty libraries only when they warn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in ("uvicorn", "httpx", "opentelemetry"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
