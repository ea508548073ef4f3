"""How deep an activity may be nested: each text is read twice, by a door and by a worker."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from federation.activitypub.posted import MOST_NESTED, NoActivity, is_nested, read_posted

JSON = st.recursive(
    st.none() | st.text('[]{}"\\\\ab'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[]{}"\\\\'), inner),
    max_leaves=200,
)


def depth(value: object) -> int:
    match value:
        case list():
            return 1 + max(map(depth, value), default=0)
        case dict():
            return 1 + max(map(depth, value.values()), default=0)
    return 0


@given(JSON, st.integers(0, 6))
@example("[", 0)
def test_levels_are_counted_as_they_are(value: object, most: int) -> None:
    """Whatever brackets and quotes its texts have."""
    assert is_nested(json.dumps(value).encode(), most) == (depth(value) > most)


def activity(levels: int) -> bytes:
    """One that is nested so deep, itself counted."""
    return (
        b'{"type": "Create", "actor": "https://a.example/u", "object": '
        + b"[" * (levels - 1)
        + b"]" * (levels - 1)
        + b"}"
    )


def test_an_activity_that_no_worker_might_read_is_none() -> None:
    assert read_posted(activity(MOST_NESTED)).kind == "Create"
    with pytest.raises(NoActivity, match="nested more than 100"):
        read_posted(activity(MOST_NESTED + 1))
