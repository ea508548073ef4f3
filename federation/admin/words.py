"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from db import AttemptNote


def counted(number: int, thing: str = "delivery") -> str:
    """Format a number of things, deliveries by default."""
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}{'es' if thing.endswith('x') else 's'}"
    return f"{number} {thing if number == 1 else plural}"


def ended(outcome: str, note: AttemptNote | None) -> str:
    """Say how an attempt ended; of the last one at a delivery that it was the last says more than its outcome."""
    if note is AttemptNote.GIVEN_UP:
        return "given up"
    return outcome if note is None else f"{outcome}, {note.replace('_', ' ')}"


def ago(duration: timedelta) -> str:
    """Format the duration in its two largest units."""
    seconds = max(round(duration.total_seconds()), 0)
    parts = [(seconds // 86_400, "d"), (seconds // 3_600 % 24, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number) or "0 s"


def moment(at: datetime) -> str:
    """Format a time to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
