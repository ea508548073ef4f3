"""Who may come in by name: an account has a role, and the hash of a password or of a token.

An account is written as `name:role:hash` in one word, several are separated by spaces. The hash of a password is one of
Argon2, which takes its time; that of a token is `sha256:` and 64 hex digits, for a token is long and random.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final

from argon2 import DEFAULT_HASH_LENGTH, PasswordHasher, extract_parameters
from argon2.exceptions import InvalidHashError, VerificationError

SHORTEST_PASSWORD: Final = 8
LONGEST_SECRET: Final = 1_000
TOKEN_PREFIX: Final = "sha256:"  # noqa: S105 - names the kind of a hash

NAME_FORM: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Role(StrEnum):
    """What somebody may do: a viewer looks, an operator acts as well."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Somebody who may come in."""

    name: str
    role: Role
    hash: str = field(repr=False)


def parse_accounts(text: str) -> tuple[Account, ...]:
    """Parse accounts as they are written in a setting.

    Raises:
        ValueError: one is malformed, or a name is there twice; no hash is quoted.
    """
    accounts = tuple(_parsed(word) for word in text.split())
    names = [account.name for account in accounts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"an account has one role and one hash; twice: {', '.join(sorted(twice))}")
    return accounts


def _parsed(word: str) -> Account:
    name, _, rest = word.partition(":")
    role, _, digest = rest.partition(":")
    if not NAME_FORM.fullmatch(name):
        raise ValueError("an account is written name:role:hash, its name in letters, digits and ._@-")
    if role not in list(Role):
        raise ValueError(f"the role of {name} must be viewer or operator")
    if digest.startswith(TOKEN_PREFIX):
        if not _DIGEST.fullmatch(digest.removeprefix(TOKEN_PREFIX)):
            raise ValueError(f"the token of {name} is sha256: and 64 hex digits")
    elif not _is_whole(digest):
        raise ValueError(
            f"the hash of {name} must be one of Argon2, whole, as the command that makes accounts prints it"
        )
    return Account(name=name, role=Role(role), hash=digest)


def _is_whole(digest: str) -> bool:
    """Tell whether it is a hash of Argon2. With a part cut off nobody could log in, and nothing would say why."""
    try:
        return extract_parameters(digest).hash_len >= DEFAULT_HASH_LENGTH
    except (ValueError, LookupError):  # InvalidHashError is a ValueError; of other remains it says nothing
        return False


def hash_password(password: str) -> str:
    """Return the hash of a password, as an account has it.

    Raises:
        ValueError: the password is too short to keep anybody out, or too long to be logged in with.
    """
    if len(password.strip()) < SHORTEST_PASSWORD:
        raise ValueError(f"a password must have at least {SHORTEST_PASSWORD} characters, spaces around it not counted")
    if len(password) > LONGEST_SECRET:
        raise ValueError(f"a password must have at most {LONGEST_SECRET} characters")
    return PasswordHasher().hash(password)


def make_token() -> tuple[str, str]:
    """Make a token, and return it with its hash."""
    token = secrets.token_urlsafe(32)
    return token, TOKEN_PREFIX + _digest(token)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class Accounts:
    """The accounts of a dashboard. Checking a password takes a while on purpose: do it in a thread."""

    def __init__(self, accounts: Iterable[Account] = ()) -> None:
        self._accounts = {account.name: account for account in accounts}
        self._hasher = PasswordHasher()

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def named(self, name: str) -> Account | None:
        """Return the account of that name."""
        return self._accounts.get(name)

    def of_token(self, token: str) -> Account | None:
        """Return the account whose token this is. Passwords are none, and the check is quick."""
        if not token:
            return None
        given = TOKEN_PREFIX + _digest(token[:LONGEST_SECRET])
        same = [each for each in self._accounts.values() if hmac.compare_digest(given.encode(), each.hash.encode())]
        return same[0] if same else None

    def check(self, name: str, secret: str) -> Account | None:
        """Return the account if this is its password or token; an unknown name takes as long as a known one.

        An empty secret is nobody's, even if somebody has made a hash of it.
        """
        account = self._accounts.get(name)
        if not secret or len(secret) > LONGEST_SECRET:
            return None
        expected = self._nobodys if account is None else account.hash
        return account if self._is(secret, expected) else None

    def _is(self, secret: str, expected: str) -> bool:
        if expected.startswith(TOKEN_PREFIX):
            return hmac.compare_digest(TOKEN_PREFIX + _digest(secret), expected)
        try:
            return self._hasher.verify(expected, secret)
        except (VerificationError, InvalidHashError):
            return False

    @cached_property
    def _nobodys(self) -> str:
        """A hash that no secret has, as costly to compare with as the others."""
        others: Sequence[str] = [account.hash for account in self._accounts.values()]
        costly = next((each for each in others if not each.startswith(TOKEN_PREFIX)), None)
        if costly is None:
            return TOKEN_PREFIX + _digest(secrets.token_hex())
        # The same parameters and salt with another end: nothing is known whose hash this is.
        head, _, end = costly.rpartition("$")
        return f"{head}${end[::-1]}"
