"""Signatures of HTTP requests, as servers of the fediverse make and check them: two kinds, by pure functions.

Theory of operation. Both kinds sign a text, the base, with a line for each component of the request that they cover.
Draft-cavage-12 tells them in one header, RFC 9421 in two, as structured fields (RFC 8941). The body is covered by its
digest, which is a header, too (RFC 3230, RFC 9530). Who verifies builds the base from the URL by which he is known, and
never from a header: so what was signed for another server does not verify. The type of the key decides the algorithm,
whatever the signature says of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from enum import StrEnum
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from federation.activitypub.signature_fields import (
    BYTES,
    DIGEST,
    INPUT,
    PARAMETER,
    STRING,
    BadSignature,
    Parameters,
    by_name,
    decoded,
    inner_list,
    known,
    members,
    parameters_of,
    texts_of,
    unquoted,
)
from federation.protocol.encodings import encode_base64
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin

VerifyingKey: TypeAlias = rsa.RSAPublicKey | ed25519.Ed25519PublicKey

MOST_SIGNATURES: Final = 3
SMALLEST_RSA_BITS: Final = 2048
LARGEST_RSA_BITS: Final = 8192
SKEW: Final = timedelta(minutes=5)
"""How far clocks may differ where a signature says when it ends: some give it ten seconds, Mastodon an hour more."""

_LONGEST_HEADER: Final = 16_384
_LABEL: Final = "sig1"
_BY_CAVAGE: Final = ("(request-target)", "host", "date", "digest", "content-type")
_GET_BY_CAVAGE: Final = ("(request-target)", "host", "date")
_BY_RFC9421: Final = ("@method", "@target-uri", "content-digest", "content-type")
_DIGESTS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "sha-256": lambda body: hashlib.sha256(body).digest(),
    "sha-512": lambda body: hashlib.sha512(body).digest(),
}

_SECONDS: Final = re.compile(r"[0-9]{1,15}")
_PREFIX: Final = re.compile(r"\Asignature +(?=[A-Za-z])", re.IGNORECASE)
"""What the draft begins `Authorization` with, and old versions of node-http-signature the header `Signature`, too."""
_DECIMAL: Final = re.compile(r"[0-9]{1,11}\.[0-9]{1,9}")
"""How the draft's 2.1.5 lets an end be written; what is signed is its text."""
_AUTHORITY: Final = re.compile(r"[^/?#]+")
_TARGET: Final = re.compile(r"[^:/?#]+://[^/?#]*(?P<path>[^?#]*)(?P<query>\?[^#]*)?")


class SignatureKind(StrEnum):
    """How a request is signed: as in draft-cavage-http-signatures-12, or as in RFC 9421."""

    CAVAGE = "cavage"
    RFC9421 = "rfc9421"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, and the URL by which others find its public half."""

    key_id: str
    private: rsa.RSAPrivateKey = field(repr=False)


def sign(
    kind: SignatureKind, *, method: str, url: str, body: bytes, content_type: str, at: datetime, key: SigningKey
) -> dict[str, str]:
    """Return the headers of a signed request: `Date`, `Content-Type`, the digest and the signature.

    *url* is spelled as the HTTP client sends it, since the server compares what it received.
    """
    headers = {"Date": format_datetime(at.astimezone(UTC), usegmt=True), "Content-Type": content_type}
    digest = encode_base64(hashlib.sha256(body).digest())
    if kind is SignatureKind.CAVAGE:
        headers["Digest"] = f"SHA-256={digest}"
        return {**headers, "Signature": _by_cavage(_BY_CAVAGE, Requested.of(method, url, headers, body), key)}
    headers["Content-Digest"] = f"sha-256=:{digest}:"
    parameters: Parameters = {"alg": "rsa-v1_5-sha256", "keyid": key.key_id, "created": int(at.timestamp())}
    signature = _signed(_rfc9421_base(_BY_RFC9421, parameters, Requested.of(method, url, headers, body)), key)
    told = f"{_LABEL}={inner_list(_BY_RFC9421, parameters)}"
    return {**headers, "Signature-Input": told, "Signature": f"{_LABEL}=:{signature}:"}


def sign_get(*, url: str, at: datetime, key: SigningKey) -> dict[str, str]:
    """Return the headers of a signed GET: by draft-cavage, which whoever wants these signed takes."""
    headers = {"Date": format_datetime(at.astimezone(UTC), usegmt=True)}
    return {**headers, "Signature": _by_cavage(_GET_BY_CAVAGE, Requested.of("GET", url, headers, b""), key)}


def verify(
    *,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    public: VerifyingKey,
    now: datetime,
    window: timedelta,
) -> str:
    """Check that a request was signed with this key, by either kind, and return the id by which it names the key.

    *url* is the target by the receiver's own name, not by what the request says. Of several signatures one has to
    verify. It was made less than *window* ago, or ahead, and has not expired.

    Raises:
        BadSignature: it was not.
    """
    if isinstance(public, rsa.RSAPublicKey) and not SMALLEST_RSA_BITS <= public.key_size <= LARGEST_RSA_BITS:
        raise BadSignature(f"the key has {public.key_size} bits")
    requested = Requested.of(method, url, headers, body)
    problem = BadSignature("there is no signature")
    for claim in claims_in(headers):
        try:
            claim.check(requested, public, now, window)
        except BadSignature as error:
            problem = error
        else:
            return claim.key_id
    raise problem


def claims_in(headers: Mapping[str, str]) -> list[SignatureClaim]:
    """Return the signatures that a request claims to have, unverified: they say which key to fetch.

    Raises:
        BadSignature: there are too many, or none that is well made.
    """
    given = _lower(headers)
    signature, told = (given.get(name) for name in ("signature", "signature-input"))
    if signature is None:
        raise BadSignature("there is no signature")
    if len(signature) + len(told or "") > _LONGEST_HEADER:
        raise BadSignature("the signature is too long")
    claims = [_cavage_claim(signature)] if told is None else list(_rfc9421_claims(told, signature))
    named = [claim for claim in claims if claim.key_id]
    if not named:
        raise BadSignature("no signature names its key")
    return named


@dataclass(frozen=True, slots=True)
class Requested:
    """What is requested of whom; the names of headers are in lower case."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    host_header: str | None = None

    @classmethod
    def of(cls, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Requested:
        """Make one, with the names of headers in any case."""
        return cls(method, url, _lower(headers), body)

    @property
    def host(self) -> str:
        return canonical_origin(self.url).partition("://")[2]

    @property
    def spellings(self) -> list[Requested]:
        """The request with our host as we write it, and as it was sent, if that means the same.

        It may have capitals, or the port that goes without saying.
        """
        sent = self.headers.get("host", "")
        try:
            is_ours = canonical_origin(f"{self.url.partition(':')[0]}://{sent}") == canonical_origin(self.url)
        except UrlError:
            is_ours = False
        is_another = is_ours and sent != self.host and _AUTHORITY.fullmatch(sent) is not None
        return [self, replace(self, host_header=sent)] if is_another else [self]

    @property
    def path(self) -> str:
        return self._target["path"] or "/"

    @property
    def query(self) -> str:
        """It begins with a question mark, or is empty where there is none."""
        return self._target["query"] or ""

    @property
    def derived(self) -> dict[str, str]:
        """The components of RFC 9421 §2.2, and the headers that are not believed."""
        origin, target = canonical_origin(self.url), self.path + self.query
        return {
            "@method": self.method,
            "@target-uri": origin + target,
            "@authority": self.host,
            "@scheme": origin.partition(":")[0],
            "@request-target": target,
            "@path": self.path,
            "@query": self.query or "?",
            **self.framing,
        }

    @property
    def framing(self) -> dict[str, str]:
        """What proxies may write anew, or leave out."""
        return {"host": self.host_header or self.host, "content-length": str(len(self.body))}

    @property
    def _target(self) -> re.Match[str]:
        found = _TARGET.match(self.url)
        assert found is not None, "it has an origin"
        return found


@dataclass(frozen=True, slots=True)
class SignatureClaim:
    """A signature that a request claims to have. It covers components in the order in which they were signed."""

    kind: SignatureKind
    key_id: str
    covered: Sequence[str]
    parameters: Parameters
    signature: bytes

    def check(self, requested: Requested, public: VerifyingKey, now: datetime, window: timedelta) -> None:
        """Check the claim by the rules of its kind.

        Raises:
            BadSignature: it does not hold.
        """
        self.check_form(requested, now, window)
        self.check_key(requested, public)

    def check_form(self, requested: Requested, now: datetime, window: timedelta) -> None:
        """Check what needs no key: what is covered, when it was made, and the digest of the body.

        Raises:
            BadSignature: it does not hold, whoever made it.
        """
        self._check_cover(requested)
        self._check_time(requested, now, window)
        _check_digest(self.kind, requested)

    def check_key(self, requested: Requested, public: VerifyingKey) -> None:
        """Check that this key made the signature.

        Raises:
            BadSignature: it did not.
        """
        if not any(_is_signed(base, self.signature, public) for base in self.bases(requested)):
            raise BadSignature("it is not this key's signature of this request")

    def _check_cover(self, requested: Requested) -> None:
        names = {*self.covered}
        if self.kind is SignatureKind.CAVAGE:
            is_dated = not names.isdisjoint({"date", "(created)"})
            is_enough = is_dated and {"(request-target)", "host", "digest"} <= names
        else:
            target = {"@authority", "@path", *(["@query"] if requested.query else [])}
            is_enough = {"@method", "content-digest"} <= names and ("@target-uri" in names or target <= names)
        if not is_enough or len(names) < len(self.covered):
            raise BadSignature("it leaves out what could be changed")

    def _check_time(self, requested: Requested, now: datetime, window: timedelta) -> None:
        created, expires = self._moment("created"), self._moment("expires")
        if created is None and self.kind is SignatureKind.RFC9421:
            raise BadSignature("it does not say when it was made")
        told = [] if created is None else [created]
        if "date" in self.covered:
            told.append(_date(requested.headers.get("date", "")))
        if any(abs(now - each) > window for each in told):
            raise BadSignature("it was made at another time")
        if expires is not None and expires + min(SKEW, window) < now:
            raise BadSignature("it has expired")

    def _moment(self, name: str) -> datetime | None:
        seconds = self.parameters.get(name)
        if seconds is None:
            return None
        if name == "expires" and self.kind is SignatureKind.CAVAGE and _DECIMAL.fullmatch(str(seconds)):
            seconds = int(str(seconds).partition(".")[0])
        if not isinstance(seconds, int) or not 0 <= seconds < 1 << 37:  # after that, `datetime` knows no time
            raise BadSignature(f"{name} is no time")
        return datetime.fromtimestamp(seconds, UTC)

    def bases(self, requested: Requested) -> Iterator[str]:
        """Yield the texts of which one was signed: some servers sign the target without its query, or another spelling.

        Raises:
            BadSignature: it covers a component that there is not.
        """
        for spelt in requested.spellings:
            if self.kind is SignatureKind.RFC9421:
                yield _rfc9421_base(self.covered, self.parameters, spelt)
                continue
            yield _cavage_base(self.covered, self.parameters, spelt)
            if spelt.query:
                bare = replace(spelt, url=spelt.url.partition("?")[0])
                yield _cavage_base(self.covered, self.parameters, bare)


def _by_cavage(covered: Sequence[str], requested: Requested, key: SigningKey) -> str:
    signature = _signed(_cavage_base(covered, {}, requested), key)
    return f'keyId="{key.key_id}",algorithm="rsa-sha256",headers="{" ".join(covered)}",signature="{signature}"'


def _signed(base: str, key: SigningKey) -> str:
    return encode_base64(key.private.sign(base.encode(), padding.PKCS1v15(), SHA256()))


def _is_signed(base: str, signature: bytes, public: VerifyingKey) -> bool:
    try:
        if isinstance(public, rsa.RSAPublicKey):
            public.verify(signature, base.encode(), padding.PKCS1v15(), SHA256())
        else:
            public.verify(signature, base.encode())
    except InvalidSignature:
        return False
    return True


def _cavage_base(covered: Sequence[str], parameters: Parameters, requested: Requested) -> str:
    special = {
        "(request-target)": f"{requested.method.lower()} {requested.path}{requested.query}",
        **requested.framing,
        **{f"({name})": str(parameters[name]) for name in ("created", "expires") if name in parameters},
    }
    return "\n".join(f"{name}: {_component(name, special, requested)}" for name in covered)


def _rfc9421_base(covered: Sequence[str], parameters: Parameters, requested: Requested) -> str:
    derived = requested.derived
    lines = [f'"{name}": {_component(name, derived, requested)}' for name in covered]
    return "\n".join([*lines, f'"@signature-params": {inner_list(covered, parameters)}'])


def _component(name: str, special: Mapping[str, str], requested: Requested) -> str:
    value = special.get(name) if name.startswith(("@", "(")) or name in special else requested.headers.get(name)
    if value is None:
        raise BadSignature("it covers what is not there, or what we do not know")
    return value


def _check_digest(kind: SignatureKind, requested: Requested) -> None:
    """Compare the body with each digest of a kind that we know; there has to be one."""
    header, form = ("digest", DIGEST) if kind is SignatureKind.CAVAGE else ("content-digest", BYTES)
    told = texts_of(members(requested.headers.get(header, ""), form))
    known = {name.lower(): text for name, text in told.items() if name.lower() in _DIGESTS}
    if not known or any(encode_base64(_DIGESTS[name](requested.body)) != text for name, text in known.items()):
        raise BadSignature("the digest is not the body's")


def _cavage_claim(header: str) -> SignatureClaim:
    told = parameters_of(_PREFIX.sub("", header))
    times = {name: told.get(name, "") for name in ("created", "expires")}
    return SignatureClaim(
        kind=SignatureKind.CAVAGE,
        key_id=told.get("keyid", ""),
        covered=told.get("headers", "date").lower().split(),
        parameters={name: int(text) if _SECONDS.fullmatch(text) else text for name, text in times.items() if text},
        signature=decoded(told.get("signature", "")),
    )


def _rfc9421_claims(told: str, header: str) -> Iterator[SignatureClaim]:
    inputs, signatures = list(known(told, INPUT)), texts_of(known(header, BYTES))
    if len(inputs) > MOST_SIGNATURES:
        raise BadSignature(f"there are more than {MOST_SIGNATURES} signatures")
    for each in inputs:
        try:
            yield _rfc9421_claim(each, signatures.get(each["name"], ""))
        except BadSignature:
            continue


def _rfc9421_claim(told: re.Match[str], signature: str) -> SignatureClaim:
    given = by_name(PARAMETER.finditer(told["parameters"]))
    parameters = {name: int(it["number"]) if it["number"] else unquoted(it["text"]) for name, it in given.items()}
    return SignatureClaim(
        kind=SignatureKind.RFC9421,
        key_id=str(parameters.get("keyid", "")),
        covered=[unquoted(name) for name in re.findall(STRING, told["covered"] or "")],
        parameters=parameters,
        signature=decoded(signature),
    )


def _date(text: str) -> datetime:
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        raise BadSignature("the date is none") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value.strip(" \t") for name, value in headers.items()}
