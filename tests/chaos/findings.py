"""What a round did, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Findings:
    """Of one round; `did` counts what happened, `endings` how its jobs ended, `notes` say what could not be done."""

    storage: str
    seed: str
    did: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
