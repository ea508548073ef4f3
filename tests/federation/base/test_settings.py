"""Settings: what each variable means, and how wrong ones are told."""

from __future__ import annotations

import os
import stat
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

import pytest
from pydantic import SecretStr

from federation.base.errors import ConfigurationError
from federation.base.settings.settings import Settings, write_env_file
from federation.base.settings.types import FirstKnock, JobPayload
from federation.protocol.keys import generate_own_keys
from tests.federation.protocol.vectors import A, B

pytestmark = pytest.mark.usefixtures("empty_environment")

COMPLETE = {"BETTER_AUTH_URL": "https://a.example", **A.env}
SECRETS = (A.env["FEDERATION_PRIVATE_KEY"], A.env["FEDERATION_ENCRYPTION_PRIVATE_KEY"])
NOTHING_SET = "not set; `federation init`, or `keys generate FILE`, makes a set of keys"


def problems_of(error: pytest.ExceptionInfo[ConfigurationError]) -> dict[str, str]:
    """The problems by the variable they name."""
    parts = [problem.partition(": ") for problem in error.value.problems]
    assert len({name for name, _, _ in parts}) == len(parts), "each variable is named once"
    return {name: text for name, _, text in parts}


def test_without_any_variable_the_documented_defaults_hold() -> None:
    """An empty environment gives a node on SQLite, and no identity."""
    settings = Settings.load()
    assert settings.model_dump() == {
        "better_auth_url": None,
        "federation_public_key": None,
        "federation_private_key": None,
        "federation_encryption_public_key": None,
        "federation_encryption_private_key": None,
        "federation_old_public_key": None,
        "federation_old_private_key": None,
        "federation_old_encryption_public_key": None,
        "federation_old_encryption_private_key": None,
        "database_url": SecretStr("sqlite:///federation.sqlite3"),
        "redis_url": None,
        "queue_url": None,
        "dev_allowed_hostnames": frozenset(),
        "federation_bind": "127.0.0.1",
        "federation_port": 8000,
        "federation_inbound_per_client": 3000,
        "federation_inbound_per_origin": 3000,
        "federation_trusted_proxies": (),
        "federation_metrics_bind": "127.0.0.1",
        "federation_metrics_clients": (),
        "federation_dashboard_bind": "127.0.0.1",
        "federation_dashboard_url": None,
        "federation_dashboard_accounts": None,
        "federation_dashboard_proxies": (),
        "federation_dashboard_proxy_secret": None,
        "federation_queue_prefix": "bull",
        "federation_allow_eviction": False,
        "federation_job_payload": JobPayload.REFERENCE,
        "federation_delivery_attempts": 5,
        "federation_delivery_backoff": timedelta(seconds=5),
        "federation_delivery_concurrency": 10,
        "federation_health_concurrency": 3,
        "federation_discovery_concurrency": 10,
        "federation_tasks": (),
        "federation_analytics_out": None,
        "federation_tasks_concurrency": 10,
        "federation_health_first_delay": timedelta(minutes=5),
        "federation_health_step": timedelta(minutes=10),
        "federation_health_checks": 5,
        "federation_long_probe_first": timedelta(hours=1),
        "federation_long_probe_maximum": timedelta(hours=24),
        "federation_probe_interval": timedelta(minutes=1),
        "federation_outbox_interval": timedelta(seconds=30),
        "federation_lease": timedelta(seconds=30),
        "federation_grace": timedelta(seconds=20),
        "federation_per_server": 3,
        "federation_overtime": 500,
        "federation_delivery_max_age": timedelta(days=7),
        "federation_keep_attempts": timedelta(days=30),
        "federation_release_rate": 50,
        "federation_max_stalls": 3,
        "federation_activitypub": False,
        "federation_activitypub_key_bits": 2048,
        "federation_activitypub_first_knock": FirstKnock.CAVAGE,
        "federation_activitypub_http": False,
        "federation_activitypub_window": timedelta(hours=1),
        "federation_activitypub_key_cache": timedelta(hours=24),
    }


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("BETTER_AUTH_URL", "https://A.Example:443/some/path/", "https://a.example"),
        ("FEDERATION_ALLOW_EVICTION", "true", True),
        ("FEDERATION_PUBLIC_KEY", "abc", "abc"),
        ("FEDERATION_PRIVATE_KEY", "abc", SecretStr("abc")),
        ("FEDERATION_ENCRYPTION_PUBLIC_KEY", "abc", "abc"),
        ("FEDERATION_ENCRYPTION_PRIVATE_KEY", "abc", SecretStr("abc")),
        ("FEDERATION_OLD_PUBLIC_KEY", "abc", "abc"),
        ("FEDERATION_OLD_PRIVATE_KEY", "abc", SecretStr("abc")),
        ("FEDERATION_OLD_ENCRYPTION_PUBLIC_KEY", "abc", "abc"),
        ("FEDERATION_OLD_ENCRYPTION_PRIVATE_KEY", "abc", SecretStr("abc")),
        ("DATABASE_URL", "postgres://u:p@db/x", SecretStr("postgres://u:p@db/x")),
        ("REDIS_URL", "rediss://u:p@r:1/2", SecretStr("rediss://u:p@r:1/2")),
        ("QUEUE_URL", "bullmq+redis://r:1", SecretStr("bullmq+redis://r:1")),
        ("QUEUE_URL", "bull+redis://r:1", SecretStr("bull+redis://r:1")),
        ("QUEUE_URL", "bull+redis://r:1?dialect=C", SecretStr("bull+redis://r:1?dialect=C")),
        ("QUEUE_URL", "postgres://u:p@db/x", SecretStr("postgres://u:p@db/x")),
        ("QUEUE_URL", "file:///var/queues", SecretStr("file:///var/queues")),
        ("QUEUE_URL", "rediss://r:1", SecretStr("rediss://r:1")),
        ("REDIS_URL", "redis+sentinel://u:p@a,b:2/svc/1", SecretStr("redis+sentinel://u:p@a,b:2/svc/1")),
        ("QUEUE_URL", "bullmq+redis+cluster://a:1,b:2", SecretStr("bullmq+redis+cluster://a:1,b:2")),
        (
            "DEV_ALLOWED_HOSTNAMES",
            "localhost, http://B.test:1/x,[::1]:2",
            frozenset({"localhost", "b.test:1", "[::1]:2"}),
        ),
        ("FEDERATION_BIND", "0.0.0.0", "0.0.0.0"),
        ("FEDERATION_PORT", "1", 1),
        ("FEDERATION_INBOUND_PER_CLIENT", "1", 1),
        ("FEDERATION_INBOUND_PER_ORIGIN", "1", 1),
        (
            "FEDERATION_TRUSTED_PROXIES",
            "10.0.0.7, fd00::/8",
            (ip_network("10.0.0.7"), ip_network("fd00::/8")),
        ),
        ("FEDERATION_METRICS_BIND", "0.0.0.0", "0.0.0.0"),
        ("FEDERATION_DASHBOARD_BIND", "10.0.0.7", "10.0.0.7"),
        ("FEDERATION_DASHBOARD_URL", "https://ops.example", "https://ops.example"),
        ("FEDERATION_DASHBOARD_ACCOUNTS", "anna:viewer:$argon2id$x", SecretStr("anna:viewer:$argon2id$x")),
        ("FEDERATION_DASHBOARD_PROXIES", "10.0.0.5", (ip_network("10.0.0.5"),)),
        ("FEDERATION_DASHBOARD_PROXY_SECRET", "0123456789abcdef", SecretStr("0123456789abcdef")),
        ("FEDERATION_METRICS_CLIENTS", "127.0.0.1,10.0.0.0/8", (ip_network("127.0.0.1"), ip_network("10.0.0.0/8"))),
        ("FEDERATION_QUEUE_PREFIX", "mine", "mine"),
        ("FEDERATION_DELIVERY_ATTEMPTS", "1", 1),
        ("FEDERATION_DELIVERY_BACKOFF", "250ms", timedelta(milliseconds=250)),
        ("FEDERATION_DELIVERY_CONCURRENCY", "50", 50),
        ("FEDERATION_HEALTH_CONCURRENCY", "1", 1),
        ("FEDERATION_DISCOVERY_CONCURRENCY", "7", 7),
        ("FEDERATION_ANALYTICS_OUT", "/var/lib/analytics", Path("/var/lib/analytics")),
        ("FEDERATION_TASKS", "shop.tasks, mails", ("shop.tasks", "mails")),
        ("FEDERATION_TASKS_CONCURRENCY", "7", 7),
        ("FEDERATION_HEALTH_FIRST_DELAY", "1.5h", timedelta(minutes=90)),
        ("FEDERATION_HEALTH_STEP", "30", timedelta(seconds=30)),
        ("FEDERATION_HEALTH_CHECKS", "7", 7),
        ("FEDERATION_LONG_PROBE_FIRST", "2h", timedelta(hours=2)),
        ("FEDERATION_LONG_PROBE_MAXIMUM", "2d", timedelta(days=2)),
        ("FEDERATION_PROBE_INTERVAL", "5m", timedelta(minutes=5)),
        ("FEDERATION_OUTBOX_INTERVAL", "1m", timedelta(minutes=1)),
        ("FEDERATION_LEASE", "2 m", timedelta(minutes=2)),
        ("FEDERATION_GRACE", "1d", timedelta(days=1)),
        ("FEDERATION_PER_SERVER", "9", 9),
        ("FEDERATION_JOB_PAYLOAD", "inline", JobPayload.INLINE),
        ("FEDERATION_OVERTIME", "0", 0),
        ("FEDERATION_DELIVERY_MAX_AGE", "30d", timedelta(days=30)),
        ("FEDERATION_DELIVERY_MAX_AGE", "0", None),
        ("FEDERATION_KEEP_ATTEMPTS", "3d", timedelta(days=3)),
        ("FEDERATION_RELEASE_RATE", "7", 7),
        ("FEDERATION_MAX_STALLS", "0", 0),
        ("FEDERATION_ACTIVITYPUB", "1", True),
        ("FEDERATION_ACTIVITYPUB_KEY_BITS", "4096", 4096),
        ("FEDERATION_ACTIVITYPUB_FIRST_KNOCK", "rfc9421", FirstKnock.RFC9421),
        ("FEDERATION_ACTIVITYPUB_HTTP", "1", True),
        ("FEDERATION_ACTIVITYPUB_WINDOW", "5m", timedelta(minutes=5)),
        ("FEDERATION_ACTIVITYPUB_KEY_CACHE", "1h", timedelta(hours=1)),
    ],
)
def test_each_variable_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: object
) -> None:
    """The variable's text becomes the field's value."""
    monkeypatch.setenv(variable, text)
    assert getattr(Settings.load(), variable.lower()) == value


def test_every_variable_has_a_case_above() -> None:
    """A new setting cannot be forgotten here."""
    cases = test_each_variable_is_read_from_the_environment.pytestmark[0].args[1]  # type: ignore[attr-defined] # by the mark
    assert {variable.lower() for variable, _, _ in cases} == Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BETTER_AUTH_URL", "ftp://s3cret.example"),
        ("BETTER_AUTH_URL", "s3cret"),
        ("BETTER_AUTH_URL", "https://user:s3cret@a.example"),
        ("DATABASE_URL", "mysql://u:s3cret@db/x"),
        ("DATABASE_URL", "s3cret"),
        ("DATABASE_URL", "sqlite://"),
        ("DATABASE_URL", "postgresql://u:s3cret@host/x?x=s3cret"),
        ("DATABASE_URL", "sqlite:///x.db?x=s3cret"),
        ("REDIS_URL", "redis://u:s3cret@host:1?x=s3cret"),
        ("REDIS_URL", "redis+sentinel://u:s3cret@host:1/name?x=s3cret"),
        ("QUEUE_URL", "redis://u:s3cret@host:1?x=s3cret"),
        ("QUEUE_URL", "bullmq+redis://u:s3cret@host:1?x=s3cret"),
        ("QUEUE_URL", "bull+redis://u:s3cret@host:1?x=s3cret"),
        ("QUEUE_URL", "postgresql://u:s3cret@host/x?x=s3cret"),
        ("REDIS_URL", "redis://u:s3cret@host:1?queue=s3cret"),
        ("REDIS_URL", "redis://u:s3cret@host:1?dialect=C"),
        ("REDIS_URL", "redis+sentinel://u:s3cret@host:1/name?dialect=C"),
        ("QUEUE_URL", "redis://u:s3cret@host:1?metrics=60"),
        ("QUEUE_URL", "bullmq+redis://u:s3cret@host:1?queue=s3cret"),
        ("QUEUE_URL", "bull+redis://u:s3cret@host:1?max_foreign_stalls=1"),
        ("REDIS_URL", "http://:s3cret@redis"),
        ("REDIS_URL", "redis://u:s3cret@host:port"),
        ("REDIS_URL", "redis:///s3cret"),
        ("QUEUE_URL", "http://u:s3cret@host:1"),
        ("QUEUE_URL", "redis://u:s3cret@host:port"),
        ("QUEUE_URL", "bullmq+redis://u:s3cret@host:port"),
        ("QUEUE_URL", "bull+redis://u:s3cret@host:port"),
        ("QUEUE_URL", "bull+redis://host:1?dialect=s3cret"),
        ("QUEUE_URL", "bull+rediss://host:1/0?dialect="),
        ("QUEUE_URL", "bull+redis://host:1?dialect=B"),
        ("QUEUE_URL", "redis://:s3cret@host:1?allow_eviction=true"),
        ("QUEUE_URL", "bullmq+bull+redis://host:1"),
        ("QUEUE_URL", "postgresql://u:s3cret@host:port/x"),
        ("REDIS_URL", "redis+cluster://u:s3cret@host:1"),
        ("REDIS_URL", "redis+sentinel://u:s3cret@host:1"),
        ("QUEUE_URL", "redis+cluster://u:s3cret@host:port"),
        ("QUEUE_URL", "redis://host:1?wait_replicas=s3cret"),
        ("QUEUE_URL", "bull+redis+cluster://u:s3cret@host:1"),
        ("QUEUE_URL", "redis+elsewhere://u:s3cret@host:1"),
        ("QUEUE_URL", "s3cret"),
        ("QUEUE_URL", "file:///"),
        ("QUEUE_URL", "file://s3cret/queues"),
        ("DEV_ALLOWED_HOSTNAMES", "fine.example,s3cret host"),
        ("FEDERATION_TRUSTED_PROXIES", "10.0.0.7, s3cret"),
        ("FEDERATION_TRUSTED_PROXIES", "10.0.0.7/8"),
        ("FEDERATION_PORT", "0"),
        ("FEDERATION_INBOUND_PER_CLIENT", "0"),
        ("FEDERATION_INBOUND_PER_ORIGIN", "1/s"),
        ("FEDERATION_PORT", "s3cret"),
        ("FEDERATION_QUEUE_PREFIX", "s3cret" * 20),
        ("FEDERATION_DELIVERY_ATTEMPTS", "0"),
        ("FEDERATION_KEEP_ATTEMPTS", "71h"),
        ("FEDERATION_DELIVERY_BACKOFF", "0s"),
        ("FEDERATION_DELIVERY_BACKOFF", "-1s"),
        ("FEDERATION_DELIVERY_BACKOFF", "5 parsecs s3cret"),
        ("FEDERATION_LEASE", "9" * 400),
        ("FEDERATION_LEASE", "366d"),
        ("FEDERATION_LEASE", "25h"),
        ("FEDERATION_HEALTH_CHECKS", "1.5"),
        ("FEDERATION_MAX_STALLS", "-1"),
        ("FEDERATION_ACTIVITYPUB", "maybe"),
        ("FEDERATION_ACTIVITYPUB_KEY_BITS", "1024"),
        ("FEDERATION_ACTIVITYPUB_KEY_BITS", "long"),
        ("FEDERATION_ACTIVITYPUB_FIRST_KNOCK", "gpg"),
        ("FEDERATION_ACTIVITYPUB_HTTP", "2"),
        ("FEDERATION_ACTIVITYPUB_WINDOW", "soon"),
        ("FEDERATION_ACTIVITYPUB_KEY_CACHE", "-1h"),
        ("FEDERATION_TASKS", "fine.tasks,s3cret/tasks.py"),
        ("FEDERATION_TASKS", "fine.tasks,,s3cret"),
        ("FEDERATION_ANALYTICS_OUT", "s3://s3cret/analytics"),
    ],
)
def test_a_malformed_value_is_told_by_its_variable_and_never_quoted(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    """One problem, beginning with the variable's name; nothing of the value in it."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as error:
        Settings.load()
    assert list(problems_of(error)) == [variable]
    assert "s3cret" not in str(error.value)
    assert error.value.__cause__ is None, "pydantic's error would quote the value"


def test_a_log_too_short_for_the_analytics_is_told_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of a setting, and with the reason."""
    monkeypatch.setenv("FEDERATION_KEEP_ATTEMPTS", "2d")
    with pytest.raises(ConfigurationError, match="FEDERATION_KEEP_ATTEMPTS: must be at least 3d: each night"):
        Settings.load()


def test_everything_malformed_or_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that delivers learns of all its problems in one start."""
    wrong = {
        "DATABASE_URL": "postgresql://db/x",
        "FEDERATION_PORT": "http",
        "FEDERATION_LEASE": "soon",
        "FEDERATION_PUBLIC_KEY": B.env["FEDERATION_PUBLIC_KEY"],
        "FEDERATION_PRIVATE_KEY": A.env["FEDERATION_PRIVATE_KEY"],
        "FEDERATION_ENCRYPTION_PUBLIC_KEY": "short",
    }
    for variable, text in wrong.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as error:
        Settings.load_node()
    problems = problems_of(error)
    assert problems.keys() == {
        "FEDERATION_PORT",
        "FEDERATION_LEASE",
        "BETTER_AUTH_URL",
        "FEDERATION_PUBLIC_KEY",
        "FEDERATION_ENCRYPTION_PUBLIC_KEY",
        "FEDERATION_ENCRYPTION_PRIVATE_KEY",
    }
    assert problems["FEDERATION_ENCRYPTION_PRIVATE_KEY"] == NOTHING_SET


def test_a_malformed_variable_is_not_told_as_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """BETTER_AUTH_URL is required and unusable: one problem."""
    for variable, text in {**COMPLETE, "BETTER_AUTH_URL": "nonsense"}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as error:
        Settings.load_node()
    assert list(problems_of(error)) == ["BETTER_AUTH_URL"]
    assert "not set" not in str(error.value)


def test_a_complete_environment_makes_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing, and the keys are the ones given."""
    for variable, text in COMPLETE.items():
        monkeypatch.setenv(variable, text)
    assert Settings.load_node().own_keys() == A.keys


def test_a_dotenv_file_is_read_with_quotes_and_comments_and_yields_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quoted values lose their quotes, unknown names are ignored, empty ones count as unset."""
    Path(".env").write_text(
        '# this node\nBETTER_AUTH_URL="https://a.example"\n'
        f"FEDERATION_PUBLIC_KEY='{A.env['FEDERATION_PUBLIC_KEY']}'\n"
        "export FEDERATION_PORT=9000\nFEDERATION_GRACE=\nREDIS_URL=\nOTHER=thing\nFEDERATION_PER_SERVER=4\n"
    )
    monkeypatch.setenv("FEDERATION_PER_SERVER", "5")
    settings = Settings.load()
    assert settings.better_auth_url == "https://a.example"
    assert settings.federation_public_key == A.env["FEDERATION_PUBLIC_KEY"]
    assert settings.federation_port == 9000
    assert settings.federation_grace == timedelta(seconds=20)
    assert settings.redis_url is None
    assert settings.federation_per_server == 5


@pytest.mark.parametrize("load", [Settings.load, Settings.load_node])
def test_a_dotenv_file_that_is_no_text_is_told(load: object) -> None:
    """A binary file in that place ends in a sentence, not in a traceback."""
    Path(".env").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"^\.env: not a text file"):
        load()  # type: ignore[operator] # both are


def test_from_values_reads_neither_environment_nor_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is given counts, and it is checked like the rest."""
    monkeypatch.setenv("FEDERATION_PORT", "9000")
    Path(".env").write_text("FEDERATION_PER_SERVER=4\n")
    settings = Settings.from_values({"FEDERATION_GRACE": "3s", "DEV_ALLOWED_HOSTNAMES": frozenset({"b.test"})})
    assert (settings.federation_port, settings.federation_per_server) == (8000, 3)
    assert settings.federation_grace == timedelta(seconds=3)
    assert settings.dev_allowed_hostnames == {"b.test"}
    with pytest.raises(ConfigurationError, match="FEDERATION_GRACE"):
        Settings.from_values({"FEDERATION_GRACE": "soon"})


def test_own_keys_are_none_only_while_none_is_set() -> None:
    """One of four is a mistake, none is a node that cannot sign."""
    assert Settings.from_values({}).own_keys() is None
    for name, value in A.env.items():
        with pytest.raises(ConfigurationError) as error:
            Settings.from_values({name: value}).own_keys()
        assert problems_of(error) == {other: NOTHING_SET for other in A.env if other != name}


def test_own_keys_that_do_not_fit_together_are_told_without_a_secret() -> None:
    """Another node's public keys beside our secrets; the message holds no key."""
    mixed = {
        **A.env,
        **{name: B.env[name] for name in ("FEDERATION_PUBLIC_KEY", "FEDERATION_ENCRYPTION_PUBLIC_KEY")},
    }
    with pytest.raises(ConfigurationError) as error:
        Settings.from_values(mixed).own_keys()
    assert problems_of(error).keys() == {"FEDERATION_PUBLIC_KEY", "FEDERATION_ENCRYPTION_PUBLIC_KEY"}
    assert not any(value in str(error.value) for value in mixed.values())


def test_require_identity_wants_the_url_and_all_four_keys() -> None:
    """Everything missing is listed."""
    with pytest.raises(ConfigurationError) as error:
        Settings.from_values({}).require_identity()
    assert problems_of(error).keys() == {"BETTER_AUTH_URL", *A.env}
    Settings.from_values(COMPLETE).require_identity()


def test_no_secret_is_in_the_repr() -> None:
    """Neither keys nor URLs, which may hold passwords."""
    settings = Settings.from_values(
        {
            **COMPLETE,
            "DATABASE_URL": "postgresql://u:s3cret@db/x",
            "REDIS_URL": "redis://u:s3cret@r:1",
            "QUEUE_URL": "bullmq+redis://u:s3cret@r:1",
        }
    )
    for text in (repr(settings), str(settings), repr(settings.own_keys())):
        assert not any(secret in text for secret in (*SECRETS, "s3cret"))


def test_an_env_file_is_private_quoted_and_never_overwritten(empty_environment: Path) -> None:
    """Mode 0600 whatever the umask; what is read back is what was written."""
    path = empty_environment / ".env"
    keys = generate_own_keys()
    old = os.umask(0)
    try:
        write_env_file(path, {"BETTER_AUTH_URL": "https://a.example", **keys.to_env()})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    settings = Settings.load()
    assert settings.own_keys() == keys
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write_env_file(path, {"A": "b"})
    assert path.read_bytes() == before
