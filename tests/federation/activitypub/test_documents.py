"""What we say of actors and of ourselves, by table."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.activitypub import documents
from federation.activitypub.documents import ACTIVITY_CONTEXT, ACTIVITY_JSON, LD_JSON, SECURITY_CONTEXT, Software, Usage
from federation.activitypub.replies import Wanted

ALICE = "https://a.example/users/alice"
KEY = documents.public_key(ALICE, key_id=f"{ALICE}#main-key", pem="PEM")
TERMS = {"toot": "http://joinmastodon.org/ns#"}
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
MASTODON = f"{ACTIVITY_JSON}, {LD_JSON}, text/html;q=0.1"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, ACTIVITY_JSON),
        ("", ACTIVITY_JSON),
        ("*/*", ACTIVITY_JSON),
        ("application/*", ACTIVITY_JSON),
        (ACTIVITY_JSON, ACTIVITY_JSON),
        ("Application/Activity+JSON ; charset=utf-8", ACTIVITY_JSON),
        (LD_JSON, LD_JSON),
        ("application/ld+json", LD_JSON),
        (MASTODON, ACTIVITY_JSON),
        (BROWSER, ACTIVITY_JSON),
        (f"{ACTIVITY_JSON};q=0.5, application/ld+json;q=0.9", LD_JSON),
        (f"{ACTIVITY_JSON};q=0, */*", LD_JSON),
        (f"{ACTIVITY_JSON};q=0, application/ld+json; Q = 0.001", LD_JSON),
        (f"text/html, {ACTIVITY_JSON};q=.1", ACTIVITY_JSON),
        (f"{ACTIVITY_JSON};q=0", None),
        ("*/*;q=0", None),
        ("text/html", None),
        ("application/json", None),
        ("image/*, text/*;q=0.5", None),
        (f"{ACTIVITY_JSON};q=2", None),
        (f"{ACTIVITY_JSON};q=1.5", None),
        (f"{ACTIVITY_JSON};q=nan", None),
        (f"{ACTIVITY_JSON};q=", None),
        (f"{ACTIVITY_JSON};q=.", None),
        (f"{ACTIVITY_JSON};q=-1", None),
        (",;,=,;q=1;", None),
        ("\x00\xff,;q", None),
    ],
)
def test_the_form_is_the_askers_choice(accept: str | None, kind: str | None) -> None:
    """By the range that says most of a type; a quality that is none counts for nothing."""
    assert documents.accepted(accept) == kind


@pytest.mark.parametrize(
    ("context", "after"),
    [
        (None, [ACTIVITY_CONTEXT, SECURITY_CONTEXT]),
        (ACTIVITY_CONTEXT, [ACTIVITY_CONTEXT, SECURITY_CONTEXT]),
        ([ACTIVITY_CONTEXT], [ACTIVITY_CONTEXT, SECURITY_CONTEXT]),
        ((ACTIVITY_CONTEXT,), [ACTIVITY_CONTEXT, SECURITY_CONTEXT]),
        ([ACTIVITY_CONTEXT, TERMS], [ACTIVITY_CONTEXT, SECURITY_CONTEXT, TERMS]),
        ([SECURITY_CONTEXT, ACTIVITY_CONTEXT], [SECURITY_CONTEXT, ACTIVITY_CONTEXT]),
        (SECURITY_CONTEXT, [SECURITY_CONTEXT]),
        (TERMS, [SECURITY_CONTEXT, TERMS]),
        ([], [SECURITY_CONTEXT]),
    ],
)
def test_the_key_joins_a_document_of_any_context(context: object, after: list[object]) -> None:
    """The application's document stays as it is."""
    document = {"@context": context, "id": ALICE, "name": "Alice", "publicKey": [{"id": "theirs"}]}
    before = dict(document)
    assert documents.with_key(document, KEY) == {"@context": after, "id": ALICE, "name": "Alice", "publicKey": KEY}
    assert document == before


def test_a_document_without_a_context_gets_one() -> None:
    assert documents.with_key({"id": ALICE}, KEY)["@context"] == [ACTIVITY_CONTEXT, SECURITY_CONTEXT]


@pytest.mark.parametrize(("is_instance", "kind"), [(False, "Person"), (True, "Application")])
def test_a_minimal_document_has_what_receivers_ask_for(is_instance: bool, kind: str) -> None:
    assert documents.minimal_actor(ALICE, is_instance=is_instance) == {
        "@context": ACTIVITY_CONTEXT,
        "id": ALICE,
        "type": kind,
        "inbox": f"{ALICE}/inbox",
        "outbox": f"{ALICE}/outbox",
        "followers": f"{ALICE}/followers",
        "following": f"{ALICE}/following",
        "preferredUsername": "alice",
    }


def test_a_removed_actor_keeps_what_verifies_its_delete() -> None:
    assert documents.removed_actor(ALICE, is_instance=False, key=KEY) == {
        "@context": [ACTIVITY_CONTEXT, SECURITY_CONTEXT],
        "id": ALICE,
        "type": "Person",
        "inbox": f"{ALICE}/inbox",
        "publicKey": {"id": f"{ALICE}#main-key", "owner": ALICE, "publicKeyPem": "PEM"},
    }


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (ALICE, "alice"),
        ("https://a.example/@alice", "alice"),
        ("https://a.example/users/alice/", "alice"),
        ("https://a.example/users/%C3%A4", "ä"),
        ("https://a.example/u/alice?v=/2", "alice"),
        ("https://a.example:8443/", "a.example:8443"),
    ],
)
def test_a_name_is_the_end_of_the_url(url: str, name: str) -> None:
    assert documents.name_of(url) == name


def test_webfinger_leads_to_the_actor() -> None:
    assert documents.webfinger("acct:alice@a.example", ALICE) == {
        "subject": "acct:alice@a.example",
        "aliases": [ALICE],
        "links": [{"rel": "self", "type": "application/activity+json", "href": ALICE}],
    }


def test_nodeinfo_says_what_runs_here() -> None:
    schema, href = "http://nodeinfo.diaspora.software/ns/schema/2.1", "https://a.example/nodeinfo/2.1"
    assert documents.nodeinfo_index("https://a.example") == {"links": [{"rel": schema, "href": href}]}
    info = documents.nodeinfo(Software(name="notes", version="1.2", repository="https://code.example/notes"), Usage())
    assert info["software"] == {"name": "notes", "version": "1.2", "repository": "https://code.example/notes"}
    assert set(info) == {"version", "software", "protocols", "services", "openRegistrations", "usage", "metadata"}
    assert documents.nodeinfo(Software(name="notes", version="1"), Usage())["software"] == {
        "name": "notes",
        "version": "1",
    }


def test_nodeinfo_counts_what_it_is_told() -> None:
    """No count is none, and nought is one."""
    some = Software(name="notes", version="1")
    told = documents.nodeinfo(some, Usage(users=3, active_month=2, active_half_year=0, local_posts=41))
    assert told["usage"] == {"users": {"total": 3, "activeMonth": 2, "activeHalfyear": 0}, "localPosts": 41}
    assert documents.nodeinfo(some, Usage(local_posts=0))["usage"] == {"users": {}, "localPosts": 0}


@pytest.mark.parametrize("name", ["", "Notes", "my notes", "notes\n", "nötes"])
def test_a_name_that_nodeinfo_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="software"):
        Software(name=name, version="1")


def test_host_meta_is_xml_with_a_template() -> None:
    xrd = ElementTree.fromstring(documents.host_meta("https://a.example"))
    link = xrd.find("{http://docs.oasis-open.org/ns/xri/xrd-1.0}Link")
    assert link is not None
    assert (link.get("rel"), link.get("template")) == (
        "lrdd",
        "https://a.example/.well-known/webfinger?resource={uri}",
    )


@pytest.mark.parametrize(("is_changing", "age"), [(False, 180), (True, 0)])
def test_a_key_about_to_change_is_not_kept(is_changing: bool, age: int) -> None:
    assert documents.caching(is_changing=is_changing) == {
        "Vary": "Accept",
        "Cache-Control": f"public, max-age={age}",
    }


PIECES = st.sampled_from(
    [ACTIVITY_JSON, "application/ld+json", "application/*", "*/*", ";q=", "0.5", "1", ",", ";", "=", " "]
)


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
def test_any_accept_has_a_meaning(accept: str) -> None:
    """Nothing that a stranger writes there is an error."""
    assert documents.accepted(accept) in (ACTIVITY_JSON, LD_JSON, None)


@given(st.text(), st.text())
def test_any_request_is_refused_or_a_plain_path(target: str, accept: str) -> None:
    wanted = Wanted(method="GET", target=target, accept=accept)
    assert wanted.refusal() is not None or (target.startswith("/") and target.isascii() and target.isprintable())
    assert wanted.base == ""
