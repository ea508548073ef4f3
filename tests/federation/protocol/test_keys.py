"""Own keys from the environment, other servers' keys from the wire."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import traceback

import pytest

from federation.protocol.errors import KeyMaterialError
from federation.protocol.keys import decode_key, fingerprint, generate_own_keys
from tests.federation.protocol.vectors import SERVERS, A, B, Server, own_keys

SECRET_VARIABLES = ("FEDERATION_PRIVATE_KEY", "FEDERATION_ENCRYPTION_PRIVATE_KEY")


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_environment_round_trip(server: Server) -> None:
    """The four values of a known server give keys that write the same four values and fingerprints."""
    keys = server.keys
    assert keys.to_env() == server.env
    assert fingerprint(keys.signing.public) == server.signing_fingerprint
    assert fingerprint(keys.encryption.public) == server.encryption_fingerprint


def test_generated_keys_are_fresh_and_valid() -> None:
    """Fresh keys pass the checks of the environment and never repeat."""
    first, second = generate_own_keys(), generate_own_keys()
    assert own_keys(first.to_env()) == first
    assert not set(first.to_env().values()) & set(second.to_env().values())


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("FEDERATION_PUBLIC_KEY", "", "expected 32 bytes, got 0"),
        ("FEDERATION_PUBLIC_KEY", B.env["FEDERATION_PUBLIC_KEY"], "not the public half"),
        ("FEDERATION_PRIVATE_KEY", base64.b64encode(bytes(range(32))).decode(), "expected 64 bytes, got 32"),
        ("FEDERATION_PRIVATE_KEY", base64.b64encode(bytes(range(64))).decode(), "the second half"),
        ("FEDERATION_PRIVATE_KEY", A.env["FEDERATION_PRIVATE_KEY"] + "\n", "not strict base64"),
        ("FEDERATION_ENCRYPTION_PUBLIC_KEY", B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"], "not the public half"),
        ("FEDERATION_ENCRYPTION_PRIVATE_KEY", "AAAA", "expected 32 bytes, got 3"),
        ("FEDERATION_ENCRYPTION_PRIVATE_KEY", "clé", "not strict base64"),
    ],
)
def test_wrong_environment_value(variable: str, value: str, complaint: str) -> None:
    """A wrong value is reported under its variable's name, without the value."""
    with pytest.raises(KeyMaterialError) as caught:
        own_keys(A.env | {variable: value})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{variable}: ")
    assert complaint in problem
    assert not value or value.strip() not in problem


def test_every_problem_at_once() -> None:
    """Four wrong values are four problems in one error."""
    with pytest.raises(KeyMaterialError) as caught:
        own_keys(dict.fromkeys(A.env, "!"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == list(A.env)


@pytest.mark.parametrize("exposed", [repr, str, "{}".format, ascii])
def test_own_secrets_stay_out_of_reprs(exposed: type[str]) -> None:
    """No way of printing the keys shows a secret, in base64, hex or bytes."""
    keys = A.keys
    text = exposed(keys) + exposed(keys.signing) + exposed(keys.encryption)
    for secret in (keys.signing.secret, keys.signing.secret[:32], keys.encryption.secret):
        assert base64.b64encode(secret).decode()[:20] not in text
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text


@pytest.mark.parametrize("variable", SECRET_VARIABLES)
def test_own_secrets_stay_out_of_errors(variable: str) -> None:
    """A damaged secret shows up in no part of the printed error."""
    damaged = A.env[variable][:-4] + "!!!!"
    with pytest.raises(KeyMaterialError) as caught:
        own_keys(A.env | {variable: damaged})
    printed = "".join(traceback.format_exception(caught.value))
    assert damaged not in printed
    assert A.env[variable][:16] not in printed


@pytest.mark.parametrize("leave", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("part", ["signing", "encryption"])
def test_secrets_are_not_pickled_or_copied(leave: type[object], part: str) -> None:
    """A key pair refuses to leave the process or be duplicated in it."""
    with pytest.raises(TypeError, match="holds a secret key"):
        leave(getattr(A.keys, part))


def test_own_keys_are_not_pickled() -> None:
    """The value that holds both pairs cannot be pickled either."""
    with pytest.raises(TypeError, match="holds a secret key"):
        pickle.dumps(A.keys)


def test_decode_key() -> None:
    """A peer's key decodes to its 32 bytes."""
    text = A.env["FEDERATION_PUBLIC_KEY"]
    assert decode_key(text, what="publicKey") == A.keys.signing.public == base64.b64decode(text)


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        json.loads("[]"),
        "",
        "AAAA",
        A.env["FEDERATION_PUBLIC_KEY"].rstrip("="),
        A.env["FEDERATION_PUBLIC_KEY"].replace("/", "_"),
        " " + A.env["FEDERATION_PUBLIC_KEY"],
        A.env["FEDERATION_PUBLIC_KEY"] + "=",
        A.env["FEDERATION_PUBLIC_KEY"][:-2] + "h=",
        base64.b64encode(bytes(33)).decode(),
        "\ud800",
        "ÿ" * 44,
    ],
)
def test_malformed_peer_key(text: object) -> None:
    """Anything but strict base64 of 32 bytes is refused, named after where it stood."""
    with pytest.raises(KeyMaterialError, match=r"^publicKey of the peer: "):
        decode_key(text, what="publicKey of the peer")
