"""What becomes of arguments and results between a caller and a worker: they arrive as they were, or are refused."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, Json, SecretStr, computed_field

from tests.patience import PATIENCE_SECONDS
from workers import Queue, Tasks
from workers.storage.memory import MemoryStorage
from workers.tasks import codecs
from workers.tasks.codecs import codec_of
from workers.tasks.misfits import Lost

PATIENCE = timedelta(seconds=PATIENCE_SECONDS)


class Named(BaseModel):
    number: int = Field(alias="the-number")


class Doubled(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documents have it
    @property
    def twice(self) -> int:
        return 2 * self.number


class Exact(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    pair: tuple[int, ...]


class Parsed(BaseModel):
    numbers: Json[list[int]]


@pytest.mark.parametrize(
    "value",
    [
        Named(**{"the-number": 3}),
        Doubled(number=3),
        Exact(at=datetime(2026, 1, 1, tzinfo=UTC), pair=(1, 2)),
        Parsed(numbers="[1, 2]"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_models_that_pydantic_writes_otherwise_than_it_reads_arrive(value: BaseModel) -> None:
    """With aliases, computed fields, strict types and JSON in them, as arguments and as results."""
    tasks = Tasks(Queue(MemoryStorage()))

    async def echo(given: object) -> object:
        assert type(given) is type(value)
        return given

    echo.__annotations__.update({"given": type(value), "return": type(value)})
    task: Any = tasks.task(echo)
    async with tasks:
        assert await (await task.enqueue(value)).result(PATIENCE) == value


class Excluded(BaseModel):
    kept: int
    left_out: int = Field(exclude=True)


class OtherName(BaseModel):
    number: int = Field(validation_alias="the-number")


class Login(BaseModel):
    user: str
    password: SecretStr


class Priced(BaseModel):
    price: Decimal | str


class Level(StrEnum):
    HIGH = "high"


class Corner(Enum):
    ORIGIN = (0, 0)


@pytest.mark.parametrize(
    ("hint", "value", "why"),
    [
        (Excluded, Excluded(kept=1, left_out=2), "would not be read again: left_out: Field required"),
        (OtherName, OtherName(**{"the-number": 3}), "would not be read again: the-number: Field required"),
        (Corner, Corner.ORIGIN, "would not be read again: Input should be"),
        (Login, Login(user="bob", password="s3cret"), "a secret in it would be stored as asterisks"),
        (list[SecretStr], [SecretStr("s3cret")], "a secret in it would be stored as asterisks"),
        (Decimal | str, Decimal("1.5"), "a Decimal in it would be read again as str"),
        (str | datetime | None, datetime(2026, 1, 1, tzinfo=UTC), "a datetime in it would be read again as str"),
        (dict[str, list[UUID | str]], {"s3cret": ["", UUID(int=7)]}, "a UUID in it would be read again as str"),
        (Priced, Priced(price=Decimal("1.5")), "a Decimal in it would be read again as str"),
        (bytes | str, b"s3cret", "a bytes in it would be read again as str"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
async def test_what_would_not_arrive_is_refused_before_anything_is_stored(hint: Any, value: object, why: str) -> None:
    """A worker could not read it, or would read something else. Nothing of it is quoted."""
    tasks = Tasks(Queue(MemoryStorage()))

    async def take(given: object) -> None: ...

    take.__annotations__["given"] = hint
    task: Any = tasks.task(take)
    with pytest.raises(ValueError, match=f"^task 'take': given: .*{why}") as refused:
        await task.enqueue(value)
    assert "s3cret" not in str(refused.value)
    assert not any((await tasks.queue.counts()).values())


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Decimal | str, "1.5"),
        (Decimal | int, Decimal("1.5")),
        (Decimal | None, Decimal("1.5")),
        (Priced, Priced(price="1.5")),
        (Level | str, Level.HIGH),
        (list[int] | tuple[int, ...], (1, 2)),
        (dict[str, Any], {"at": date(2026, 1, 1)}),
    ],
)
def test_what_a_union_tells_apart_is_taken(hint: Any, value: object) -> None:
    """And what is read as something that is alike; `Any` takes what JSON has, as it always did."""
    codec = codec_of(hint)
    codec.load(codec.dump(codec.take(value)))


async def test_a_result_that_would_not_arrive_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """The function has run; whoever waits is told, or others may read what is stored."""
    tasks = Tasks(Queue(MemoryStorage()))

    @tasks.task
    async def gives() -> Excluded:
        return Excluded(kept=1, left_out=2)

    async with tasks:
        enqueued = await gives.enqueue()
        with pytest.raises(ValueError, match="left_out: Field required"):
            await enqueued.result(PATIENCE)
    assert await tasks.queue.get_result(enqueued.id) == {"kept": 1}
    assert "gives returned a Excluded: what is stored of it would not be read again" in caplog.text
    assert "Field required" not in caplog.text, "a validator's own text may have what is secret"


@dataclass
class Tagged:
    tags: set[str]
    groups: dict[str, frozenset[int]] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)


@pytest.mark.parametrize("library", ["pydantic", "msgspec"])
def test_a_set_is_stored_in_one_order(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process has it in: enqueues are compared by it. Lists and objects stay in theirs."""

    def find_spec(name: str) -> object:
        return importlib.util.find_spec(name) if name == library else None

    monkeypatch.setattr(codecs, "find_spec", find_spec)
    words = [f"word {number}" for number in range(40)]
    codec = codec_of(Tagged)
    tagged = Tagged(set(words), {"z": frozenset(range(40)), "a": frozenset()}, [[3, 1, 2], [0]])
    dumped = codec.dump(codec.take(tagged))
    assert isinstance(dumped, dict)
    assert dumped["tags"] == sorted(words)
    assert list(dumped["groups"]) == ["z", "a"]
    assert dumped["rows"] == [[3, 1, 2], [0]]
    assert codec.load(dumped) == tagged
    assert codec_of(set[str]).dump(set(words)) == codec_of(Any).dump(frozenset(words)) == sorted(words)


def test_values_that_any_json_has_are_stored_as_they_are() -> None:
    for value in ([3, 1, 2], {"b": [1.5, None], "a": {"x": True}}, "text", 3, None):
        assert codec_of(Any).dump(value) == value
        assert codec_of(object).load(value) == value
    with pytest.raises(Lost):
        codec_of(SecretStr).dump(SecretStr("s3cret"))
    assert codec_of(date | int).dump(date(2026, 1, 1)) == "2026-01-01"
