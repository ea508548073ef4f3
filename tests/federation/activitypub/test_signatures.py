"""Both kinds of signatures: what RFC 9421 and draft-cavage print, and what no reader may take for signed."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.activitypub.signature_fields import BadSignature
from federation.activitypub.signatures import (
    SKEW,
    Requested,
    SignatureKind,
    SigningKey,
    VerifyingKey,
    claims_in,
    sign,
    verify,
)
from federation.protocol.urls import canonical_origin

KEY_ID: Final = "https://a.example/users/alice#main-key"
URL: Final = "https://b.example/users/bob/inbox?shared=1"
BODY: Final = b'{"type":"Create"}'
NOW: Final = datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC)
WINDOW: Final = timedelta(hours=1)
KINDS: Final = list(SignatureKind)


@cache
def private_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A request as a server that calls itself by the URL sees it."""

    method: str = "POST"
    url: str = URL
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = BODY
    now: datetime = NOW

    def verified(self, public: VerifyingKey | None = None) -> str:
        return verify(
            method=self.method,
            url=self.url,
            headers=self.headers,
            body=self.body,
            public=public or private_key().public_key(),
            now=self.now,
            window=WINDOW,
        )

    def with_headers(self, **changed: str) -> Received:
        """`signature_input` is the header Signature-Input."""
        return replace(self, headers={**self.headers, **{k.replace("_", "-").title(): v for k, v in changed.items()}})


def signed(kind: SignatureKind, *, url: str = URL, body: bytes = BODY, at: datetime = NOW) -> Received:
    key = SigningKey(KEY_ID, private_key())
    headers = sign(kind, method="POST", url=url, body=body, content_type="application/activity+json", at=at, key=key)
    return Received(url=url, headers=headers, body=body, now=at)


@cache
def signed_once(kind: SignatureKind) -> Received:
    return signed(kind)


def refused(received: Received, because: str, public: VerifyingKey | None = None) -> None:
    with pytest.raises(BadSignature, match=because):
        received.verified(public)


def made_by_hand(
    kind: SignatureKind, covered: str, parameters: str = "", *, received: Received, as_seen: Requested | None = None
) -> Received:
    """Signed by this key, over these components as the header names them; a strange signer's request."""
    if kind is SignatureKind.CAVAGE:
        unsigned = received.with_headers(signature=f'keyId="{KEY_ID}",headers="{covered}",signature=""{parameters}')
    else:
        told = f'a=({covered});keyid="{KEY_ID}"{parameters}'
        unsigned = received.with_headers(signature_input=told, signature="a=::")
    (claim,) = claims_in(unsigned.headers)
    seen = as_seen or Requested.of(received.method, received.url, unsigned.headers, received.body)
    base = next(iter(claim.bases(seen)))
    made = base64.b64encode(private_key().sign(base.encode(), padding.PKCS1v15(), SHA256())).decode()
    value = unsigned.headers["Signature"].replace('signature=""', f'signature="{made}"').replace("::", f":{made}:")
    return unsigned.with_headers(signature=value)


hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,10}\.example", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address.compressed}]"),
)
characters = st.one_of(st.sampled_from("abcXYZ019-._~!$&()*+,;=:@/"), st.sampled_from(["%20", "%C3%A9", "%2F", "%3f"]))
paths = st.lists(characters, max_size=12).map("".join)


@st.composite
def urls(draw: st.DrawFn) -> str:
    """With query and without, of any port, by name and by address."""
    scheme = draw(st.sampled_from(["http", "https"]))
    port = draw(st.one_of(st.just(""), st.integers(1, 65_535).map(lambda number: f":{number}")))
    query = draw(st.one_of(st.just(""), paths.map(lambda text: f"?{text}")))
    return f"{scheme}://{draw(hosts)}{port}/{draw(paths)}{query}"


moments = st.integers(0, 1 << 33).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), url=urls(), body=st.binary(max_size=200), at=moments)
def test_what_is_signed_verifies_and_nothing_else_does(
    kind: SignatureKind, url: str, body: bytes, at: datetime
) -> None:
    """For any URL, body and time; the name of the key comes along."""
    request = signed(kind, url=url, body=body, at=at)
    assert request.verified() == KEY_ID
    assert replace(request, now=at + WINDOW - timedelta(seconds=1)).verified() == KEY_ID
    refused(replace(request, body=body + b" "), "digest")
    digests = signed(kind, url=url, body=body + b" ", at=at)
    changed = {name: digests.headers[name] for name in request.headers if "Digest" in name}
    refused(replace(request, body=body + b" ", headers={**request.headers, **changed}), "this key's")
    origin = canonical_origin(url)
    refused(replace(request, url=url.replace(url.split("/")[2], "evil.example", 1)), "this key's")
    refused(replace(request, url=f"{origin}/x{url.split('/', 3)[3]}"), "this key's")
    refused(replace(request, method="PUT"), "this key's")
    for hours in (2, -2):
        refused(replace(request, now=at + timedelta(hours=hours)), "another time")


@pytest.mark.parametrize("kind", KINDS)
def test_another_key_is_refused(kind: SignatureKind) -> None:
    """Also one of another type, whatever the signature calls its algorithm."""
    refused(signed(kind), "this key's", rsa.generate_private_key(65537, 2048).public_key())
    refused(signed(kind), "this key's", ed25519.Ed25519PrivateKey.generate().public_key())
    refused(signed(kind), "1024 bits", rsa.generate_private_key(65537, 1024).public_key())


def test_the_headers_of_cavage() -> None:
    """As Mastodon sends them: these components, in this order, the target with its query."""
    headers = signed(SignatureKind.CAVAGE).headers
    assert headers["Date"] == "Sun, 01 Mar 2026 12:30:15 GMT"
    assert headers["Digest"] == "SHA-256=" + base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    told = (
        f'keyId="{KEY_ID}",algorithm="rsa-sha256",headers="(request-target) host date digest content-type",signature='
    )
    assert headers["Signature"].startswith(told)
    (claim,) = claims_in(headers)
    assert next(iter(claim.bases(Requested.of("POST", URL, headers, BODY)))).splitlines()[:3] == [
        "(request-target): post /users/bob/inbox?shared=1",
        "host: b.example",
        "date: Sun, 01 Mar 2026 12:30:15 GMT",
    ]
    assert sorted(headers) == ["Content-Type", "Date", "Digest", "Signature"]


def test_the_headers_of_rfc_9421() -> None:
    """One signature, with the time in whole seconds."""
    headers = signed(SignatureKind.RFC9421).headers
    assert headers["Signature-Input"] == (
        'sig1=("@method" "@target-uri" "content-digest" "content-type")'
        f';alg="rsa-v1_5-sha256";keyid="{KEY_ID}";created={int(NOW.timestamp())}'
    )
    assert re.fullmatch(r"sig1=:[A-Za-z0-9+/]{342}==:", headers["Signature"])
    assert re.fullmatch(r"sha-256=:[A-Za-z0-9+/]{43}=:", headers["Content-Digest"])
    assert sorted(headers) == ["Content-Digest", "Content-Type", "Date", "Signature", "Signature-Input"]


@pytest.mark.parametrize(
    ("kind", "covered"),
    [
        (SignatureKind.CAVAGE, "(request-target) host date"),
        (SignatureKind.CAVAGE, "(request-target) date digest"),
        (SignatureKind.CAVAGE, "host date digest"),
        (SignatureKind.CAVAGE, "(request-target) host digest"),
        (SignatureKind.CAVAGE, "(request-target) host date digest date"),
        (SignatureKind.RFC9421, '"@method" "@target-uri"'),
        (SignatureKind.RFC9421, '"@target-uri" "content-digest"'),
        (SignatureKind.RFC9421, '"@method" "content-digest"'),
        (SignatureKind.RFC9421, '"@method" "@path" "@authority" "content-digest"'),
        (SignatureKind.RFC9421, '"@method" "@path" "@query" "content-digest"'),
        (SignatureKind.RFC9421, '"@method" "@query" "@authority" "content-digest"'),
        (SignatureKind.RFC9421, ""),
    ],
)
def test_a_signature_has_to_cover_what_matters(kind: SignatureKind, covered: str) -> None:
    """Though it verifies: what it leaves out could be anything."""
    made = made_by_hand(kind, covered, f";created={int(NOW.timestamp())}" * (kind == "rfc9421"), received=signed(kind))
    refused(made, "leaves out")


@pytest.mark.parametrize(
    ("kind", "covered", "parameters"),
    [
        (SignatureKind.CAVAGE, "(request-target) host date digest", ""),
        (SignatureKind.CAVAGE, "digest (created) host (request-target)", ",created={now}"),
        (SignatureKind.CAVAGE, "digest (created) host (request-target) (expires)", ",created={now},expires={soon}"),
        (SignatureKind.CAVAGE, "digest (created) host (request-target)", ',created="{now}"'),
        (SignatureKind.CAVAGE, "host date digest (request-target) (expires)", ',expires="{soon}.250"'),
        (SignatureKind.CAVAGE, "(Request-Target) Host Date Digest", ',version="1.0" , x-2 = y'),
        (SignatureKind.CAVAGE, "(request-target) host date digest content-length", ""),
        (SignatureKind.RFC9421, '"@method" "@path" "@query" "@authority" "content-digest"', ";created={now}"),
        (SignatureKind.RFC9421, '"@method" "@target-uri" "content-digest" "host"', ";created={now};expires={soon}"),
        (SignatureKind.RFC9421, '"@scheme" "@method" "@target-uri" "content-digest"', ";created={now}"),
        (SignatureKind.RFC9421, '"@method" "@target-uri" "content-digest" "@request-target"', ";created={now}"),
        (SignatureKind.RFC9421, '"@method" "@target-uri" "content-digest"', ';tag="a\\"b\\\\";created={now}'),
    ],
)  # fmt: skip
def test_other_signers_are_understood(kind: SignatureKind, covered: str, parameters: str) -> None:
    """They cover other things, in another order, and say more."""
    seconds = int(NOW.timestamp())
    told = parameters.format(now=seconds, soon=seconds + 60)
    request = made_by_hand(kind, covered, told, received=signed(kind))
    assert request.verified() == KEY_ID
    if "expires" in told:
        assert replace(request, now=NOW + timedelta(seconds=59) + min(SKEW, WINDOW)).verified() == KEY_ID
        refused(replace(request, now=NOW + timedelta(minutes=1, seconds=1) + min(SKEW, WINDOW)), "expired")


@pytest.mark.parametrize("prefix", ["Signature ", "signature  "])
def test_the_header_may_begin_as_authorization_does(prefix: str) -> None:
    """As node-http-signature wrote it; a parameter of that name is none of it."""
    request = signed(SignatureKind.CAVAGE)
    told = request.headers["Signature"]
    assert request.with_headers(Signature=prefix + told).verified() == KEY_ID
    refused(request.with_headers(Signature=prefix * 2 + told), "form")
    first, last = told.rsplit(",signature=", 1)
    assert request.with_headers(Signature=f"signature = {last},{first}").verified() == KEY_ID


def test_the_target_may_be_signed_without_its_query() -> None:
    """By cavage: some servers do."""
    request = signed(SignatureKind.CAVAGE, url=URL.partition("?")[0])
    assert replace(request, url=URL).verified() == KEY_ID


def test_the_host_is_ours_and_not_what_the_header_says() -> None:
    """Otherwise a request to another server could be sent on to us, with that server's name in it."""
    request = signed(SignatureKind.CAVAGE, url="https://c.example/users/bob/inbox?shared=1")
    refused(replace(request.with_headers(host="c.example"), url=URL), "this key's")


@pytest.mark.parametrize("kind", KINDS)
def test_a_signature_tells_its_time(kind: SignatureKind) -> None:
    """And one that is neither a date nor a number of seconds is none."""
    covered, parameters = {
        SignatureKind.CAVAGE: ("(request-target) host digest date", ""),
        SignatureKind.RFC9421: ('"@method" "@target-uri" "content-digest" "date"', ""),
    }[kind]
    request = made_by_hand(kind, covered, parameters, received=signed(kind).with_headers(date="yesterday"))
    refused(request, "date is none" if kind is SignatureKind.CAVAGE else "does not say when")
    separator = "," if kind is SignatureKind.CAVAGE else ";"
    late = made_by_hand(kind, covered, f"{separator}created=999999999999999", received=signed(kind))
    refused(late, "created is no time")


@pytest.mark.parametrize("host", ["B.example", "b.example:443", "B.EXAMPLE:443"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_may_be_spelt_as_it_was_sent(kind: SignatureKind, host: str) -> None:
    """In capitals, or with the port that goes without saying; no header that means another host counts."""
    spelt = replace(Requested.of("POST", URL, {**signed_once(kind).headers, "Host": host}, BODY), host_header=host)
    covered = {
        SignatureKind.CAVAGE: "(request-target) host date digest",
        SignatureKind.RFC9421: '"@method" "@target-uri" "content-digest" "host"',
    }[kind]
    made = made_by_hand(
        kind,
        covered,
        f";created={int(NOW.timestamp())}" * (kind == "rfc9421"),
        received=signed_once(kind),
        as_seen=spelt,
    )
    assert made.with_headers(host=host).verified() == KEY_ID
    for other in ("b.example:80", "c.example", f"{host}/", f"{host}?c.example", f"x@{host}", ""):
        refused(made.with_headers(host=other), "this key's")
    assert signed_once(kind).with_headers(host=host).verified() == KEY_ID, "it was signed as we write it"


def test_a_time_that_is_no_number_of_seconds_is_none() -> None:
    covered = "(request-target) host digest (created)"
    for time in ('"x"', "1e9", f"{NOW.timestamp()}", '"-1"'):
        refused(
            made_by_hand(SignatureKind.CAVAGE, covered, f",created={time}", received=signed_once(SignatureKind.CAVAGE)),
            "no time",
        )


@pytest.mark.parametrize(
    "other",
    [
        'p=("@method";req "@authority");keyid="proxy";created=1',
        'p=("@query-param";name="a, b");keyid="proxy";created=1',
        'p=("@method");keyid="proxy";created=1;flag',
        'p=("@method");created=1',
        'p=("@method");keyid="proxy";keyid="other";created=1',
        "p=sha-256",
    ],
)
@pytest.mark.parametrize("made", ["p=:AA==:", "p=:A:", "p=:AA==:;x", "p=?1"])
def test_a_signature_that_means_nothing_to_us_says_nothing_of_another(other: str, made: str) -> None:
    """Such as a proxy's, whichever comes first; alone it is none."""
    request = signed_once(SignatureKind.RFC9421)
    ours = request.headers["Signature-Input"], request.headers["Signature"]
    for told, signature in (
        (f"{other} , {ours[0]}", f"{made} ,{ours[1]}"),
        (f"{ours[0]}, {other}", f"{ours[1]}, {made}"),
    ):
        assert request.with_headers(signature_input=told, signature=signature).verified() == KEY_ID
    with pytest.raises(BadSignature):
        request.with_headers(signature_input=other, signature=made).verified()


def test_any_signature_of_three_will_do() -> None:
    """A proxy may have added its own, which means nothing to us; more than three are too many to look at."""
    request = signed(SignatureKind.RFC9421)
    told, made = request.headers["Signature-Input"], request.headers["Signature"]
    other = '("@authority");keyid="proxy";created=1'
    several = request.with_headers(
        signature_input=f"p={other}, {told}, q={other}", signature=f"p=:AA==:, q=:AA==:,{made}"
    )
    assert several.verified() == KEY_ID
    many = several.with_headers(signature_input=f"p={other}, {told}, q={other}, r={other}")
    refused(many, "more than 3")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SignatureKind.CAVAGE, "Signature", None),
        (SignatureKind.CAVAGE, "Digest", None),
        (SignatureKind.CAVAGE, "Content-Type", None),
        (SignatureKind.CAVAGE, "Digest", "{},SHA-512=AAAA"),
        (SignatureKind.CAVAGE, "Signature", "{},"),
        (SignatureKind.CAVAGE, "Signature", '{},keyId="x"'),
        (SignatureKind.CAVAGE, "Signature", 'keyId="a",headers="(request-target) host date digest",signature="%"'),
        (SignatureKind.CAVAGE, "Signature", 'headers="(request-target) host date digest",signature="AAAA"'),
        (SignatureKind.CAVAGE, "Signature", 'keyId="a",signature="AAAA"'),
        (SignatureKind.CAVAGE, "Signature", "x" * 20_000),
        (SignatureKind.RFC9421, "Signature", None),
        (SignatureKind.RFC9421, "Signature-Input", None),
        (SignatureKind.RFC9421, "Content-Digest", None),
        (SignatureKind.RFC9421, "Content-Digest", "sha-256=:AAAA:"),
        (SignatureKind.RFC9421, "Signature", "other=:AAAA:"),
        (SignatureKind.RFC9421, "Signature", "sig1=:A:"),
        (SignatureKind.RFC9421, "Signature-Input", "{};"),
        (SignatureKind.RFC9421, "Signature-Input", "{};flag"),
        (SignatureKind.RFC9421, "Signature-Input", "{};created=1"),
        (SignatureKind.RFC9421, "Signature-Input", "{}, {}"),
        (SignatureKind.RFC9421, "Signature-Input", 'sig1=("@method";req);created=1'),
        (SignatureKind.RFC9421, "Signature-Input", "sig1=(" + " " * 16_000),
    ],
)
def test_what_is_not_well_made_is_refused(kind: SignatureKind, name: str, value: str | None) -> None:
    """By one error, whatever it is."""
    request = signed_once(kind)
    others = {each: told for each, told in request.headers.items() if each != name}
    changed = {} if value is None else {name: value.replace("{}", request.headers[name])}
    with pytest.raises(BadSignature):
        replace(request, headers={**others, **changed}).verified()


def test_a_digest_has_to_be_of_a_kind_that_we_know() -> None:
    """It is signed, but says nothing to us of the body."""
    request = signed_once(SignatureKind.CAVAGE).with_headers(digest="MD5=AAAA")
    refused(made_by_hand(SignatureKind.CAVAGE, "(request-target) host date digest", received=request), "digest is not")


def test_nothing_is_covered_that_is_not_known() -> None:
    """A component that another version of RFC 9421 may have would be one that we read in a header of that name."""
    request, told = signed_once(SignatureKind.RFC9421), '"@method" "@target-uri" "content-digest" "@status"'
    headers = {"@status": "200", "Signature-Input": f'a=({told});keyid="k";created={int(NOW.timestamp())}'}
    refused(replace(request, headers={**request.headers, **headers, "Signature": "a=:AAAA:"}), "do not know")


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(KINDS), place=st.integers(0, 700), text=st.text(max_size=3), cut=st.integers(0, 4))
def test_no_header_breaks_the_reader(kind: SignatureKind, place: int, text: str, cut: int) -> None:
    """Whatever a stranger writes into it: it verifies, or is refused."""
    request = signed_once(kind)
    for name in ("Signature", "Signature-Input", "Digest", "Content-Digest", "Date"):
        value = request.headers.get(name, "")
        broken = value[:place] + text + value[place + cut :]
        try:
            assert replace(request, headers={**request.headers, name: broken}).verified()
        except BadSignature:
            continue


def test_the_key_is_in_no_repr() -> None:
    """Logs and errors show values by it."""
    assert repr(SigningKey(KEY_ID, private_key())) == f"SigningKey(key_id='{KEY_ID}')"


# RFC 9421, B.2: the request, and what was signed of it.

CONTENT: Final = b'{"hello": "world"}'
REQUEST: Final = Requested("POST", "https://example.com/foo?param=Value&Pet=dog", {}, CONTENT)
DIGEST: Final = "sha-512=:WZDPaVn/7XgHaAy8pmojAkGWoRx2UFChF41A2svX+TaPm+AbwAgBWnrIiYllu7BNNyealdVLvRwEmTHWXvJwew==:"
TOLD: Final = {
    "date": "Tue, 20 Apr 2021 02:07:55 GMT",
    "content-type": "application/json",
    "content-digest": DIGEST,
    "content-length": "18",
}


def test_rfc_9421_b26() -> None:
    """The signature of an Ed25519 key over the base that we build; B.2 prints none by RSA with PKCS #1."""
    headers = {
        **TOLD,
        "signature-input": (
            'sig-b26=("date" "@method" "@path" "@authority" "content-type" "content-length")'
            ';created=1618884473;keyid="test-key-ed25519"'
        ),
        "signature": (
            "sig-b26=:wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw==:"
        ),
    }
    (claim,) = claims_in(headers)
    (base,) = claim.bases(replace(REQUEST, headers=headers))
    public = load_der_public_key(base64.b64decode("MCowBQYDK2VwAyEAJrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs="))
    assert isinstance(public, ed25519.Ed25519PublicKey)
    public.verify(claim.signature, base.encode())
    assert claim.key_id == "test-key-ed25519"
    with pytest.raises(BadSignature, match="leaves out"):  # the digest
        Received(url=REQUEST.url, headers=headers, body=CONTENT).verified(public)


def test_rfc_9421_b23() -> None:
    """The base of the signature that covers everything, and its digest."""
    told = (
        '("date" "@method" "@path" "@query" "@authority" "content-type" "content-digest" "content-length")'
        ';created=1618884473;keyid="test-key-rsa-pss"'
    )
    headers = {**TOLD, "signature-input": f"sig-b23={told}", "signature": "sig-b23=:AAAA:"}
    (claim,) = claims_in(headers)
    assert next(iter(claim.bases(replace(REQUEST, headers=headers)))).splitlines() == [
        '"date": Tue, 20 Apr 2021 02:07:55 GMT',
        '"@method": POST',
        '"@path": /foo',
        '"@query": ?param=Value&Pet=dog',
        '"@authority": example.com',
        '"content-type": application/json',
        f'"content-digest": {DIGEST}',
        '"content-length": 18',
        f'"@signature-params": {told}',
    ]
    at = datetime.fromtimestamp(1618884473, UTC)
    refused(Received(url=REQUEST.url, headers=headers, body=CONTENT, now=at), "this key's")  # all else is right
    refused(Received(url=REQUEST.url, headers=headers, body=CONTENT + b" ", now=at), "digest")


CAVAGE_KEY: Final = (
    "MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDCFENGw33yGihy92pDjZQhl0C36rPJj+CvfSC8+q28hxA161QFNUd13wuCTUcq0Qd2qsBe/2hF"
    "yc2DCJJg0h1L78+6Z4UMR7EOcpfdUE9Hf3m/hs+FUR45uBJeDK1HSFHD8bHKD6kv8FPGfJTotc+2xjJwoYi+1hqp1fIekaxsyQIDAQAB"
)


@pytest.mark.parametrize(
    ("covered", "made"),
    [
        (
            "(request-target) host date",
            "qdx+H7PHHDZgy4y/Ahn9Tny9V3GP6YgBPyUXMmoxWtLbHpUnXS2mg2+SbrQDMCJypxBLSPQR2aAjn7ndmw2iicw3HMbe8VfEdKFYRqzic+ef"
            "kb3nndiv/x1xSHDJWeSWkx3ButlYSuBskLu6kd9Fswtemr3lgdDEmn04swr2Os0=",
        ),
        (
            "(request-target) host date content-type digest content-length",
            "vSdrb+dS3EceC9bcwHSo4MlyKS59iFIrhgYkz8+oVLEEzmYZZvRs8rgOp+63LEM3v+MFHB32NfpB2bEKBIvB1q52LaEUHFv120V01IL+TAD4"
            "8XaERZFukWgHoBTLMhYS2Gb51gWxpeIq8knRmPnYePbF5MOkR0Zkly4zKH7s1dE=",
        ),
    ],
)
def test_draft_cavage_c(covered: str, made: str) -> None:
    """The signatures of appendix C.2 and C.3 are those of the base that we build. Their key is too small for us."""
    headers = {
        "date": "Sun, 05 Jan 2014 21:31:40 GMT",
        "content-type": "application/json",
        "digest": "SHA-256=X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=",
        "content-length": "18",
        "signature": f'keyId="Test",algorithm="rsa-sha256",headers="{covered}",signature="{made}"',
    }
    (claim,) = claims_in(headers)
    url = "https://example.com/foo?param=value&pet=dog"
    public = load_der_public_key(base64.b64decode(CAVAGE_KEY))
    assert isinstance(public, rsa.RSAPublicKey)
    base = next(iter(claim.bases(Requested("POST", url, headers, CONTENT))))
    public.verify(claim.signature, base.encode(), padding.PKCS1v15(), SHA256())
    assert claim.key_id == "Test"
    refused(Received(url=url, headers=headers, body=CONTENT), "1024 bits", public)
