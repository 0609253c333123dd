"""Events of Managers under the names of torchft's three loggers, and from there to OpenTelemetry if wanted.

`torchft_quorums` has a record for each quorum with a new id, `torchft_commits` one for each vote, and
`torchft_errors` one for each abort of a process group, if such a logger has a handler or a level: on the
root's handlers alone they would say again what the logger `torchft_like` says. With TORCHFT_USE_OTEL=true
all of them go to the console and to the collector that opentelemetry's own variables name
(OTEL_EXPORTER_OTLP_ENDPOINT, ...). That needs `pip install 'torchft-like[otel]'`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lighthouse.core.json_text import read_json
from lighthouse.events import Event, EventLog
from lighthouse.forks import lock_of_each_process
from torchft_like.errors import ConfigError

USE_OTEL_ENV = "TORCHFT_USE_OTEL"
TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON = "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON"

# By kind of event.
_LOGGERS = {"quorum": "torchft_quorums", "commit": "torchft_commits", "abort": "torchft_errors"}
_EXPORT_LIMIT_S = 5
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

_lock = lock_of_each_process()
_providers: dict[str, Any] = {}


def setup_logger(name: str) -> None:
    """Send the records of the logger `name` to OpenTelemetry from now on, if TORCHFT_USE_OTEL is true.

    TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON may name a file with the resource's attributes for each logger.
    Called again, or without TORCHFT_USE_OTEL, it does nothing.

    Raises:
        ConfigError: opentelemetry is not installed, or the file is malformed.
    """
    if os.environ.get(USE_OTEL_ENV, "").lower() in ("", "0", "false"):
        return
    with _lock:
        if name in _providers:
            return
        _providers[name] = provider = _provider(_attributes(name))
    logger = logging.getLogger(name)
    logger.addHandler(_Handler(provider.get_logger(name)))
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def shutdown() -> None:
    """Export the records that are left, and end; this happens at the interpreter's exit, too."""
    with _lock:
        for provider in _providers.values():
            provider.shutdown()


def followed(events: EventLog) -> EventLog:
    """Pass these events on to torchft's loggers.

    Raises:
        ConfigError: opentelemetry is not installed, or the file of attributes is malformed.
    """
    for name in _LOGGERS.values():
        setup_logger(name)
    events.subscribe(_tell, _is_wanted)
    return events


def _is_wanted(kind: str) -> bool:
    if (name := _LOGGERS.get(kind)) is None:
        return False
    logger = logging.getLogger(name)
    return bool(logger.handlers or logger.level) and logger.isEnabledFor(logging.INFO)


def _tell(event: Event) -> None:
    extra: dict[str, object] = {
        "job_id": os.environ.get("JOB_ID", "unknown"),
        "replica_id": event.replica_id,
        "rank": event.group_rank,
        "quorum_id": event.quorum_id,
        "step": event.step,
    }
    if event.kind == "commit":
        extra["commit_result"] = event.fields["committed"]
    elif event.kind == "abort":
        extra |= {"error": "process_group_abort", "reason": event.fields["reason"]}
    logging.getLogger(_LOGGERS[event.kind]).info("%s", event.to_text(), extra=extra)


class _Handler(logging.Handler):
    """A handler that passes records, with their extra fields as attributes, to a logger of OpenTelemetry."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        attributes = {k: v for k, v in vars(record).items() if k not in _OF_EVERY_RECORD}
        self._target.emit(
            timestamp=int(record.created * 1e9),
            severity_text=record.levelname,
            body=record.getMessage(),
            attributes=attributes,
        )


def _attributes(name: str) -> Mapping[str, Any]:
    path = os.environ.get(TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON)
    if not path:
        return {}
    try:
        attributes = read_json(Path(path).read_text())[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON} is {path}: it must be a JSON file with an object of "
            f"attributes under {name!r}: {error!r}"
        ) from error
    if not isinstance(attributes, dict):
        raise ConfigError(f"in {path} the value of {name!r} is no object of attributes")
    return attributes


def _provider(attributes: Mapping[str, Any]) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter  # noqa: PLC0415
        from opentelemetry.sdk._logs import LoggerProvider  # noqa: PLC0415
        from opentelemetry.sdk._logs.export import (  # noqa: PLC0415
            BatchLogRecordProcessor,
            ConsoleLogRecordExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"{USE_OTEL_ENV} is set, and opentelemetry is not there: pip install 'torchft-like[otel]'"
        ) from error
    provider = LoggerProvider(resource=Resource.create(attributes))
    for exporter in (ConsoleLogRecordExporter(), OTLPLogExporter(timeout=_EXPORT_LIMIT_S)):
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider
