"""Values of ours as JSON has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from enum import Enum


def jsonable(value: object) -> object:
    """Return the value as JSON has it: days and times in ISO 8601, durations in seconds, a dataclass as an object."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Enum():
            return value.value
        case Mapping():
            return {str(jsonable(key)): jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [jsonable(each) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
