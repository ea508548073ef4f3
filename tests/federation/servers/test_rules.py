"""Blacklist rules: what each covers, and that the fast look-up says what a naive one says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.servers.blacklist_rules import RuleSet, canonical_rule, rules_covering

NOW = datetime(2026, 1, 2, tzinfo=UTC)


SAME_MACHINE = (
    *("https://203.0.113.7", "https://3405803783", "https://[::ffff:203.0.113.7]", "https://[::ffff:cb00:7107]"),
    *("https://[64:ff9b::203.0.113.7]", "https://[2002:cb00:7107::1]"),
)


def rule_set(*rules: str) -> RuleSet:
    made = RuleSet()
    for rule in rules:
        made.add(rule, None)
    return made


def covers(rule: str, url: str) -> bool:
    return rule_set(rule).covering(url, NOW.timestamp()) is not None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("https://evil.example", "https://evil.example"),
        ("HTTPS://Evil.Example:443/", "https://evil.example"),
        ("https://evil.example.", "https://evil.example"),
        ("http://evil.example:8080", "http://evil.example:8080"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("*.evil.example", "*.evil.example"),
        ("*.Evil.Example.", "*.evil.example"),
        ("*.bücher.example", "*.xn--bcher-kva.example"),
        ("*.example", "*.example"),
        ("*.10.0.0.1", "*.10.0.0.1"),
        ("http://[::FFFF:203.0.113.7]:81", "http://203.0.113.7:81"),
        ("https://[64:ff9b::cb00:7107]", "https://203.0.113.7"),
        ("https://[2002:cb00:7107::1]", "https://203.0.113.7"),
        ("https://[::203.0.113.7]", "https://[::cb00:7107]"),
    ],
)
def test_a_rule_has_one_spelling(text: str, rule: str) -> None:
    """Which is its own canonical form."""
    assert canonical_rule(text) == rule
    assert canonical_rule(rule) == rule


@pytest.mark.parametrize(
    "text",
    [
        *("", "*", "*.", "*..", "evil.example", ".evil.example", "ftp://evil.example", "https://", "*.evil.*"),
        *("https://*.evil.example", "*.*.example", "*.evil.example:8080", "*.evil.example/x", "*.u@evil.example"),
        *("https://evil.example/users/a", "https://evil.example?x", "https://evil.example#x", "*.[::1]"),
        *("https://u:p@evil.example", "ev*l.example", "*.ev*l.example", "*. evil.example", "*.evil\n.example"),
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    """Nothing is guessed: a rule that covers more or less than was meant is worse than none."""
    with pytest.raises(UrlError):
        canonical_rule(text)


@pytest.mark.parametrize(
    ("rule", "url"),
    [
        ("https://evil.example", "https://evil.example"),
        ("https://evil.example", "https://evil.example/"),
        ("https://evil.example", "https://evil.example/inbox?x=1"),
        ("https://evil.example", "HTTPS://EVIL.example:443"),
        ("https://evil.example", "https://evil.example:443"),
        ("https://evil.example", "https://evil.example:00443"),
        ("http://evil.example", "http://evil.example:80"),
        ("http://evil.example:80", "http://evil.example"),
        ("http://evil.example:443", "http://evil.example:443"),
        ("https://evil.example", "https://evil.example."),
        ("https://evil.example/", "https://evil.example"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("https://xn--bcher-kva.example", "https://BÜCHER.example"),
        ("http://127.0.0.1", "http://2130706433"),
        ("*.evil.example", "https://evil.example"),
        ("*.evil.example", "http://evil.example:8080/x"),
        ("*.evil.example", "https://a.b.c.evil.example"),
        ("*.evil.example", "https://A.EVIL.example.:443/"),
        ("*.example", "https://evil.example"),
        ("*.10.0.0.1", "http://10.0.0.1:81"),
        *((rule, url) for rule in SAME_MACHINE for url in SAME_MACHINE),
        *(("*.203.0.113.7", f"{url}:8443/x") for url in SAME_MACHINE),
    ],
)
def test_a_rule_covers_the_server_in_any_spelling(rule: str, url: str) -> None:
    """A star covers the domain itself, every name below it, and any scheme and port."""
    assert covers(rule, url)


@pytest.mark.parametrize(
    ("rule", "url"),
    [
        ("https://evil.example", "http://evil.example"),
        ("https://evil.example", "https://evil.example:8443"),
        ("https://evil.example", "https://a.evil.example"),
        ("https://evil.example:443", "http://evil.example:443"),
        ("*.evil.example", "https://evil.example:65536"),
        ("*.evil.example", "https://notevil.example"),
        ("*.evil.example", "https://example"),
        ("*.evil.example", "https://evil.example.org"),
        ("*.evil.example", "https://good.example/evil.example"),
        ("*.evil.example", "https://good.example?https://evil.example"),
        ("*.1", "http://10.0.0.1"),
        ("*.0.0.1", "http://10.0.0.1"),
        ("https://203.0.113.7", "https://[::ffff:203.0.113.8]"),
        ("https://203.0.113.7", "http://[::ffff:203.0.113.7]"),
        ("https://203.0.113.7", "https://[::203.0.113.7]"),
        ("https://203.0.113.7", "https://[2001:db8::cb00:7107]"),
        ("https://[::ffff:203.0.113.7]", "https://203.0.113.7:8443"),
        ("https://evil.example", ""),
        ("*.evil.example", "null"),
        ("*.evil.example", "https://["),
        ("*.evil.example", "\x00"),
        ("*.evil.example", "\ud800"),
    ],
)
def test_a_rule_covers_nothing_else(rule: str, url: str) -> None:
    """Neither a server of a similar name, nor an address by its digits, nor nonsense."""
    assert not covers(rule, url)


@pytest.mark.parametrize("text", ["https://evil.example/users/a", "evil", "https://u:p@evil.example", "https://", "*"])
def test_a_row_that_is_no_rule_covers_its_own_text(text: str) -> None:
    """As the original compares: byte for byte, and nothing more."""
    assert covers(text, text)
    assert not covers(text, "https://evil.example")
    assert not covers(text, text + "x")


def test_a_rule_ends_when_it_expires() -> None:
    """From that moment on; of two rows of one rule the one that lasts longer counts."""
    end, rules = NOW + timedelta(hours=1), RuleSet()
    rules.add("https://evil.example", end)
    rules.add("*.spam.example", end)
    rules.add("https://twice.example/", None)
    rules.add("https://twice.example", NOW)
    before, after = end.timestamp() - 0.001, end.timestamp()
    for url in ("https://evil.example", "https://a.spam.example"):
        assert rules.covering(url, before) is not None
        assert rules.covering(url, after) is None
    assert rules.covering("https://twice.example", after) == "https://twice.example"


def test_an_expired_rule_hides_no_other() -> None:
    """The server's own rule is past, its domain's is not."""
    rules = rule_set("*.example")
    rules.add("https://evil.example", NOW - timedelta(days=1))
    rules.add("*.evil.example", NOW - timedelta(days=1))
    assert rules.covering("https://evil.example", NOW.timestamp()) == "*.example"


LABELS = st.sampled_from(["a", "b", "evil", "x-1", "_y", "0x1", "7", "bücher", "EVIL", "xn--bcher-kva"])
HOSTS = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
ORIGINS = st.builds(
    "{}://{}{}{}".format,
    st.sampled_from(["http", "https", "HTTPS"]),
    HOSTS,
    st.sampled_from(["", ".", ":80", ":443", ":8080"]),
    st.sampled_from(["", "/", "/x"]),
)
RULES = st.one_of(ORIGINS, HOSTS.map("*.{}".format), HOSTS)
ENDS = st.sampled_from([None, NOW - timedelta(seconds=1), NOW, NOW + timedelta(seconds=1)])


def naively_covered(url: str, rules: list[tuple[str, datetime | None]]) -> bool:
    """Rule by rule, with nothing but the canonical spelling of both sides."""
    return any((end is None or end > NOW) and _covers(rule, url) for rule, end in rules)


def _covers(rule: str, url: str) -> bool:
    if rule == url:
        return True
    try:
        origin = canonical_origin(url)
        host = origin.split("://")[1].split(":")[0]
        if rule.startswith("*."):
            domain = canonical_origin("https://" + rule[2:]).removeprefix("https://")
            return host == domain or host.endswith("." + domain)
        has_path = rule.rstrip("/").count("/") > 2
        return not has_path and canonical_origin(rule) == origin
    except UrlError:
        return False


@given(st.lists(st.tuples(RULES, ENDS), max_size=12), ORIGINS)
def test_the_look_up_says_what_a_naive_one_says(rules: list[tuple[str, datetime | None]], url: str) -> None:
    """For any rules and URL, and the rule it names would cover the URL."""
    made = RuleSet()
    for rule, end in rules:
        made.add(rule, end)
    found = made.covering(url, NOW.timestamp())
    assert (found is not None) == naively_covered(url, rules)
    assert found is None or found in rules_covering(url)


@given(st.one_of(ORIGINS, st.text(alphabet="htps:/.a0x-_[]1", max_size=30), st.text(max_size=30)))
def test_a_url_taken_as_canonical_is(url: str) -> None:
    """The short cut for plain origins agrees with the whole rule book."""
    try:
        expected = canonical_origin(url)
    except UrlError:
        assert list(rules_covering(url)) == [url]
    else:
        assert expected in list(rules_covering(url))[:2]
