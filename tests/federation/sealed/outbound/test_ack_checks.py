"""Which acknowledgments of posts are checked: rules over what was checked before, without a network."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from federation.sealed.outbound import answers
from federation.sealed.outbound.answers import MAX_ANSWERERS, ONE_IN, AckChecks, Answer, one_in_some

SINCE = datetime(2026, 1, 2, tzinfo=UTC)
URL = "https://b.example"


def answer(answerer: bytes = b"b", *, url: str = URL, since: datetime = SINCE, is_empty: bool = False) -> Answer:
    return Answer(server_url=url, since=since, answerer=answerer, is_empty=is_empty)


def never() -> bool:
    return False


@pytest.fixture
def checks() -> AckChecks:
    """One acknowledgment of the server was checked, and was its own; chance asks for none."""
    made = AckChecks(never)
    assert made.wants(answer())
    assert not made.is_forged(answer(), proved=True)
    return made


def test_the_first_of_each_server_is_checked(checks: AckChecks) -> None:
    """And not the second."""
    assert not checks.wants(answer())
    assert checks.wants(answer(url="https://c.example"))


def test_the_first_after_a_change_of_the_link_is_checked(checks: AckChecks) -> None:
    """Whoever answers; answers of before count no more."""
    later = SINCE + timedelta(seconds=1)
    checks.is_forged(answer(b"c"), proved=True)
    assert checks.wants(answer(since=later))
    checks.is_forged(answer(since=later), proved=True)
    assert not checks.wants(answer(since=later))
    assert checks.wants(answer(b"c", since=later))


def test_the_first_of_each_answerer_is_checked(checks: AckChecks) -> None:
    """One that is back is none."""
    assert checks.wants(answer(b"c"))
    checks.is_forged(answer(b"c"), proved=True)
    assert [checks.wants(answer(each)) for each in (b"b", b"c", b"d")] == [False, False, True]


def test_a_server_behind_very_many_addresses_is_checked_by_chance(checks: AckChecks) -> None:
    """Otherwise each of its answers would be a new one's."""
    for number in range(2 * MAX_ANSWERERS):
        checks.is_forged(answer(b"%d" % number), proved=True)
    assert not checks.wants(answer(b"another"))
    assert not checks.wants(answer(b"b"))


def test_after_a_forged_one_all_are_checked(checks: AckChecks) -> None:
    """Until the server has proved itself again; chance alone had found it."""
    assert checks.is_forged(answer(), proved=False)
    for _ in range(3):
        assert checks.wants(answer())
        assert checks.is_forged(answer(), proved=False)
    assert not checks.is_forged(answer(), proved=True)
    assert not checks.wants(answer())


def test_an_empty_one_is_forged_where_the_server_signs(checks: AckChecks) -> None:
    """Each is seen, at no cost; of a server that never signed, it says nothing, and is looked at like others."""
    assert checks.wants(answer(is_empty=True))
    assert checks.is_forged(answer(is_empty=True), proved=False)
    stranger = answer(url="https://c.example", is_empty=True)
    assert not checks.is_forged(stranger, proved=False)
    assert not checks.wants(stranger)


def test_what_cannot_be_found_out_accuses_nobody(checks: AckChecks) -> None:
    """There may be no key to check with. It proves nothing either: an empty one is no forged one after it."""
    assert not checks.is_forged(answer(b"c"), proved=None)
    stranger = answer(url="https://c.example")
    assert not checks.is_forged(stranger, proved=None)
    assert not checks.wants(answer(url="https://c.example", is_empty=True))


def test_beyond_so_many_servers_chance_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever delivers to more would check each acknowledgment otherwise; what is remembered is bounded."""
    monkeypatch.setattr(answers, "MAX_REMEMBERED", 3)
    drawn = [False]
    checks = AckChecks(lambda: drawn[0])
    urls = [f"https://{number}.example" for number in range(5)]
    for url in urls[:3]:
        assert checks.wants(answer(url=url))
        checks.is_forged(answer(url=url), proved=True)
    assert not checks.wants(answer(url=urls[3]))
    drawn[0] = True
    assert checks.wants(answer(url=urls[3]))
    checks.is_forged(answer(url=urls[3]), proved=True)
    drawn[0] = False
    assert [checks.wants(answer(url=url)) for url in urls] == [False] * 5
    assert len(checks._known) == 3


def test_chance_draws_one_in_some() -> None:
    """Less than two hundredths of a delivery, as opening one costs a third of it."""
    drawn = sum(one_in_some() for _ in range(1_000 * ONE_IN))
    assert 1 / 3 / ONE_IN < 0.02
    assert 700 < drawn < 1300  # 1 000 expected, and ten times its standard deviation
