"""Whatever a stranger writes, who reads it takes it or refuses it in one of its own words."""

from __future__ import annotations

from random import Random

import pytest

from tests.security.readers import READERS
from tests.security.reading import altered

INPUTS = 10_000


@pytest.mark.parametrize("name", READERS)
def test_whatever_is_written_is_read_or_refused(name: str) -> None:
    """Ten thousand inputs for all of them together; `scripts/fuzz` looks for more, guided by what they reach."""
    reader, random = READERS[name], Random(name)
    for data in [*reader.seeds, *(altered(random.choice(reader.seeds), random) for _ in range(INPUTS // len(READERS)))]:
        try:
            reader.read(data)
        except reader.refusals:
            pass
        except Exception as error:
            error.add_note(f"the {name} reader was given {data[:500]!r}")
            raise


@pytest.mark.parametrize("name", READERS)
def test_what_is_altered_was_taken(name: str) -> None:
    """Or the inputs would all end at the same first refusal."""
    for seed in READERS[name].seeds:
        READERS[name].read(seed)
