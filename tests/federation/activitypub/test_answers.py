"""What receivers' answers mean: each row of the table, and what a stranger's headers and bodies may not do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest

from federation.activitypub.answers import (
    Knock,
    counted,
    failure_of,
    first_kind,
    followed,
    is_page,
    reason_of,
    second_kind,
    understood,
)
from federation.activitypub.codes import CODES, class_of_status, is_taken
from federation.activitypub.signatures import SignatureKind
from federation.codes import CODES as ALL_CODES
from federation.delivery.error_codes import FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.http.messages import Response

INBOX = "https://b.example/users/bob/inbox"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CAVAGE, RFC9421 = SignatureKind.CAVAGE, SignatureKind.RFC9421
UNAVAILABLE, REST, REJECTED = FailureClass.UNAVAILABLE, FailureClass.REST, FailureClass.REJECTED


def response(status: int, body: bytes = b"", **headers: str) -> Response:
    return Response(
        status=status, headers={name.replace("_", "-"): value for name, value in headers.items()}, body=body
    )


def knock(status: int, kind: SignatureKind = CAVAGE) -> Knock:
    return Knock(kind=kind, url=INBOX, response=response(status))


def failed(status: int, *, reason: str | None = None, **headers: str) -> PermanentFailure | RetryableFailure:
    return failure_of(response(status, **headers), INBOX, NOW, reason=reason, ours="https://a.example")


@pytest.mark.parametrize(
    ("statuses", "asks_to_wait", "kind"),
    [
        ((400, 401, 403, 404, 405, 406, 410, 413, 415, 418, 421, 422, 431, 451, 499, 501), False, REJECTED),
        ((400, 403, 404, 501), True, REJECTED),
        ((408, 425, 500, 502, 503, 504, 507, 520, 599), False, UNAVAILABLE),
        ((408, 425, 500, 502), True, UNAVAILABLE),
        ((300, 301, 302, 303, 304, 307, 308), True, UNAVAILABLE),
        ((100, 199, 600, 999), False, UNAVAILABLE),
        ((429,), False, REST),
        ((429, 503), True, REST),
    ],
)
def test_the_class_of_a_status(statuses: Iterable[int], asks_to_wait: bool, kind: FailureClass) -> None:
    """Whatever the body."""
    found = {status: class_of_status(status, asks_to_wait=asks_to_wait) for status in statuses}
    assert found == dict.fromkeys(statuses, kind)


def test_what_is_taken() -> None:
    """A 2xx, and 409: the receiver has it already."""
    assert [status for status in range(100, 1000) if is_taken(status)] == [*range(200, 300), 409]


@pytest.mark.parametrize(
    ("status", "body", "counts_as"),
    [
        (400, b'{"error":"unknown","message":""}', 409),
        (400, b'{"error":"unknown","message":"Incoming activity has invalid signature"}', 400),
        (400, b'{"error":"unknown"}', 400),
        (400, b"[" * 100_000, 400),
        (400, b"", 400),
        (401, b'{"error":"unknown","message":""}', 401),
    ],
)
def test_lemmy_says_in_its_own_way_that_it_has_it_already(status: int, body: bytes, counts_as: int) -> None:
    assert understood(Response(status=status, headers={}, body=body)).status == counts_as


def test_a_refusal_has_the_status_for_a_code_and_the_reason_in_its_message() -> None:
    failure = failed(403, reason="we know you")
    assert isinstance(failure, RetryableFailure)
    assert (failure.code, failure.failure_class, failure.tried_later) == ("HTTP_403", REJECTED, False)
    assert str(failure) == "the server answered 403: we know you"


def test_an_inbox_that_is_gone_is_not_asked_again() -> None:
    """One that is not found is asked some more times, as servers lose their routes for a while."""
    assert (type(failed(410)), failed(410).code) == (PermanentFailure, "INBOX_GONE")
    missing = failed(404)
    assert isinstance(missing, RetryableFailure)
    assert (missing.code, missing.tried_later) == ("HTTP_404", True)


def test_a_server_that_asks_for_a_rest_says_for_how_long() -> None:
    for status in (429, 503):
        failure = failed(status, retry_after="120")
        assert isinstance(failure, RetryableFailure)
        assert (failure.failure_class, failure.at_least) == (REST, timedelta(minutes=2))
    outage = failed(500, retry_after="120")
    assert isinstance(outage, RetryableFailure)
    assert (outage.failure_class, outage.at_least) == (UNAVAILABLE, None)


def test_a_redirect_that_is_not_followed_names_where_it_leads() -> None:
    failure = failed(301, location="https://c.example/inbox")
    assert isinstance(failure, RetryableFailure)
    assert (failure.code, failure.failure_class, failure.moved_to) == ("HTTP_301", UNAVAILABLE, "https://c.example")


@pytest.mark.parametrize(
    ("status", "location", "asked", "leads_to"),
    [
        (307, "/inbox?page=1#here", INBOX, "https://b.example/inbox?page=1"),
        (308, "inbox2", INBOX, "https://b.example/users/bob/inbox2"),
        (308, "https://b.example:443/inbox", INBOX, "https://b.example:443/inbox"),
        (308, "https://b.example/inbox", "http://b.example/inbox", "https://b.example/inbox"),
        (301, "/inbox", INBOX, None),
        (302, "/inbox", INBOX, None),
        (303, "/inbox", INBOX, None),
        (307, "http://b.example/inbox", INBOX, None),
        (307, "https://c.example/inbox", INBOX, None),
        (307, "//c.example/inbox", INBOX, None),
        (307, "https://b.example:8443/inbox", INBOX, None),
        (307, "https://b.example@c.example/inbox", INBOX, None),
        (307, "https://user@b.example/inbox", INBOX, None),
        (307, "file:///etc/passwd", INBOX, None),
        (307, "http://[::1", INBOX, None),
        (307, "https://b.exämple/inbox", INBOX, None),
        (307, "/in\tbox", INBOX, None),
        (307, "/in box", INBOX, None),
        (307, "\\\\c.example\\inbox", INBOX, None),
        (307, "", INBOX, None),
    ],
)
def test_redirects_lead_no_further_than_to_the_same_server(
    status: int, location: str, asked: str, leads_to: str | None
) -> None:
    assert followed(response(status, location=location), asked) == leads_to


def test_a_redirect_without_a_location_is_an_answer() -> None:
    assert followed(response(307), INBOX) is None


@pytest.mark.parametrize(
    ("status", "remembered", "kind"),
    [
        (400, None, RFC9421),
        (401, None, RFC9421),
        (401, "cavage", RFC9421),
        (400, "cavage", None),
        *((status, None, None) for status in (200, 202, 301, 403, 404, 409, 410, 429, 500, 503)),
    ],
)
def test_only_a_refusal_that_may_be_about_the_signature_is_knocked_at_again(
    status: int, remembered: str | None, kind: SignatureKind | None
) -> None:
    """A 400 is not, of a server that is known to take this kind."""
    assert second_kind(knock(status), remembered) == kind
    if kind is not None:
        assert second_kind(knock(status, kind), remembered) == CAVAGE


def test_a_403_is_about_a_signature_of_the_newer_kind() -> None:
    """As PeerTube answers what it cannot read; not where that kind is known to be taken."""
    assert second_kind(knock(403, RFC9421), None) == CAVAGE
    assert second_kind(knock(403, RFC9421), "rfc9421") is None
    assert second_kind(knock(404, RFC9421), None) is None


def test_the_first_knock_is_the_remembered_kind_or_the_settings() -> None:
    """What a later version has written there is nothing to go by."""
    found = [first_kind(remembered, RFC9421) for remembered in ("cavage", "rfc9421", "rfc9999", "", None)]
    assert found == [CAVAGE, RFC9421, RFC9421, RFC9421, RFC9421]


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        (401, 202, 202),
        (400, 404, 404),
        (401, 500, 500),
        (401, 401, 401),
        (400, 401, 400),
        (401, 400, 401),
        (403, 202, 202),
        (403, 403, 403),
    ],
)
def test_the_answer_that_counts(first: int, second: int, counts: int) -> None:
    """The other kind's, unless that was refused like the first, for whatever it is worth to that server."""
    assert counted(knock(first), knock(second, RFC9421)).response.status == counts


@pytest.mark.parametrize(
    ("body", "is_one"),
    [(b"<html>", True), (b"\xef\xbb\xbf \r\n<!doctype html>", True), (b"", False), (b"{}", False), (b"ok <b>", False)],
)
def test_a_page_begins_with_markup(body: bytes, is_one: bool) -> None:
    assert is_page(response(200, body)) == is_one
    assert not is_page(response(404, body))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error":"Mastodon says no"}', "Mastodon says no"),
        (json.dumps({"error": "a\x1b[2Jb\nc\u202e\x00" + "x" * 200}).encode(), "a[2Jbc" + "x" * 74),
        (b'{"error":"\\ud800"}', None),
        (b'{"error":{"code":"CREDENTIAL_REQUIRED"}}', None),
        (b'{"error":""}', None),
        (b'{"message":"no"}', None),
        (b'["error"]', None),
        (b'{"error":"cut of', None),
        (b"[" * 60_000, None),
        (b"\x1f\x8b\x08nonsense", None),
        (b"<html>", None),
        (b"", None),
    ],
)
def test_a_reason_is_eighty_printable_characters_of_an_error(body: bytes, reason: str | None) -> None:
    assert reason_of(body) == reason


def test_every_code_of_the_wire_is_known_to_readers_of_the_log() -> None:
    assert {code: ALL_CODES[code] for code in CODES} == CODES
