"""The one reader of the environment: every setting, its default and its meaning.

Values come from the environment, then from a `.env` file in the working directory. `Settings.load` checks for malformed
values only, so that a part of the application runs with what it needs; `Settings.load_node` checks for missing ones,
too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from db.url import absent_file
from federation.base.errors import ConfigurationError, NoNodeHere
from federation.base.settings.types import (
    Age,
    DatabaseUrl,
    Directory,
    Duration,
    FirstKnock,
    Hostnames,
    JobPayload,
    KeyBits,
    Lease,
    LogAge,
    Modules,
    Networks,
    OwnOrigin,
    QueueUrl,
    RedisUrl,
    plain,
)
from federation.protocol.errors import KeyMaterialError
from federation.protocol.keys import (
    ENCRYPTION_PUBLIC_VARIABLE,
    ENCRYPTION_SECRET_VARIABLE,
    SIGNING_PUBLIC_VARIABLE,
    SIGNING_SECRET_VARIABLE,
    OwnKeys,
)

ENV_FILE: Final = Path(".env")
"""Relative to the working directory at the time when settings are loaded."""

DEFAULT_DATABASE_URL: Final = "sqlite:///federation.sqlite3"


class Settings(BaseSettings):
    """Everything that can be set. Field names in upper case are the variables' names."""

    model_config = SettingsConfigDict(
        env_file=ENV_FILE,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        enable_decoding=False,
    )

    better_auth_url: OwnOrigin | None = None
    """This node's own URL, under which other servers know and reach it."""
    federation_public_key: str | None = None
    federation_private_key: SecretStr | None = None
    federation_encryption_public_key: str | None = None
    federation_encryption_private_key: SecretStr | None = None
    federation_old_public_key: str | None = None
    """The pairs before the last rotation, kept while a server may still know this node by them."""
    federation_old_private_key: SecretStr | None = None
    federation_old_encryption_public_key: str | None = None
    federation_old_encryption_private_key: SecretStr | None = None
    database_url: DatabaseUrl = SecretStr(DEFAULT_DATABASE_URL)
    redis_url: RedisUrl | None = None
    """Where BullMQ's queues live; unset, the queues live in the application's SQLite database."""
    queue_url: QueueUrl | None = None
    """Picks another queue storage by its scheme; wins over REDIS_URL."""
    dev_allowed_hostnames: Hostnames = frozenset()
    """Hosts exempt from the ban on private and loopback addresses: `host`, `host:port` (that port alone) or a URL."""
    federation_bind: str = "127.0.0.1"
    federation_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    federation_trusted_proxies: Networks = ()
    """Addresses and networks of proxies in front of the inbound side: their `X-Forwarded-For` or `Forwarded` counts."""
    federation_inbound_per_client: Annotated[int, Field(ge=1, le=1_000_000)] = 3000
    """How many follows, and how many posts, one client address may send in ten seconds."""
    federation_inbound_per_origin: Annotated[int, Field(ge=1, le=1_000_000)] = 3000
    """How many follows, and how many posts, are accepted from one server in ten seconds."""

    federation_metrics_bind: str = "127.0.0.1"
    """Where `--metrics-port` listens."""
    federation_metrics_clients: Networks = ()
    """Addresses and networks that may read `/metrics` on the inbound side; for all others there is none."""

    federation_dashboard_bind: str = "127.0.0.1"
    """Where the dashboard listens."""
    federation_dashboard_url: str | None = None
    """What browsers call the dashboard behind a proxy: `https://dashboard.example`."""
    federation_dashboard_accounts: SecretStr | None = None
    """Who may use the dashboard: `name:role:hash`, separated by spaces; see `federation dashboard --new-account`."""
    federation_dashboard_proxies: Networks = ()
    """Addresses and networks of proxies that say, in headers, who uses the dashboard."""
    federation_dashboard_proxy_secret: SecretStr | None = None
    """What these proxies have to say, too, so that they are believed."""

    federation_queue_prefix: Annotated[str, Field(min_length=1, max_length=100)] = "bull"
    federation_allow_eviction: bool = False
    """Whether workers start on a Redis that evicts keys, and with them jobs."""
    federation_job_payload: JobPayload = JobPayload.REFERENCE
    """Whether jobs of deliveries refer to their text, or carry it, as Node's workers on the same Redis queues need."""
    federation_delivery_attempts: Annotated[int, Field(ge=1, le=100)] = 5
    federation_delivery_backoff: Duration = timedelta(seconds=5)
    """The first pause between two attempts; each further one is twice as long."""
    federation_delivery_concurrency: Annotated[int, Field(ge=1, le=1000)] = 10
    federation_health_concurrency: Annotated[int, Field(ge=1, le=1000)] = 3
    federation_discovery_concurrency: Annotated[int, Field(ge=1, le=1000)] = 10
    federation_tasks: Modules = ()
    """The application's modules that declare tasks, comma-separated: `shop.tasks,shop.mail`."""
    federation_tasks_concurrency: Annotated[int, Field(ge=1, le=1000)] = 10
    federation_health_first_delay: Duration = timedelta(minutes=5)
    federation_health_step: Duration = timedelta(minutes=10)
    federation_health_checks: Annotated[int, Field(ge=1, le=100)] = 5
    federation_long_probe_first: Duration = timedelta(hours=1)
    """The first pause after the quick health checks; each further one is twice as long, up to the next setting."""
    federation_long_probe_maximum: Duration = timedelta(hours=24)
    federation_probe_interval: Duration = timedelta(minutes=1)
    """How often the scheduler looks for servers that are due a probe."""
    federation_outbox_interval: Duration = timedelta(seconds=30)
    """How often the scheduler looks for deliveries without a job, and how old they have to be."""
    federation_analytics_out: Directory | None = None
    """The directory of the nightly analytics' results; unset, none are computed."""
    federation_lease: Lease = timedelta(seconds=30)
    federation_grace: Duration = timedelta(seconds=20)
    federation_per_server: Annotated[int, Field(ge=1, le=1000)] = 3
    """How many attempts at one server run at once, per process."""
    federation_delivery_max_age: Age = timedelta(days=7)
    """How old a held delivery may become before it is given up; 0 means no limit."""
    federation_keep_attempts: LogAge = timedelta(days=30)
    """How long the log keeps attempts."""
    federation_overtime: Annotated[int, Field(ge=0, le=10_000)] = 500
    """How many attempts wait for slow servers outside the delivery slots, per process; each needs a file descriptor."""
    federation_release_rate: Annotated[int, Field(ge=1, le=10_000)] = 50
    """How many held deliveries a second a server gets after its return, at most; it begins with one."""
    federation_max_stalls: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often a delivery may lose its worker before it is held for a while."""

    federation_activitypub: bool = False
    """Whether activities are sent by ActivityPub, too, from a queue of their own."""
    federation_activitypub_key_bits: KeyBits = 2048
    """How long new keys of actors are; a signature by one of 4096 costs six times as much as by one of 2048."""
    federation_activitypub_first_knock: FirstKnock = FirstKnock.CAVAGE
    """The kind of signature that a server is tried with for which none is known to count."""
    federation_activitypub_http: bool = False
    """Whether inboxes may be `http:`, and keys of other servers' actors."""
    federation_activitypub_window: Duration = timedelta(hours=1)
    """How long before or after now a request to an inbox may have been signed."""
    federation_activitypub_key_cache: Duration = timedelta(hours=24)
    """How long a key of another server's actor is taken for valid without a look."""

    @classmethod
    def load(cls) -> Self:
        """Return the settings of this process: its environment, then `.env`. What is missing is None.

        Raises:
            ConfigurationError: lists every malformed value, by its variable's name and never by its content.
        """
        try:
            return cls()
        except ValidationError as error:
            raise _configuration_error(error) from None
        except UnicodeDecodeError:
            raise ConfigurationError([".env: not a text file in UTF-8"]) from None

    @classmethod
    def load_node(cls) -> Self:
        """Load as `load` does, for a process that delivers or serves, and check that nothing it needs is missing.

        Raises:
            ConfigurationError: lists everything that is malformed or missing, at once.
            NoNodeHere: all of it is missing, and so are `.env` and the database.
        """
        try:
            settings, problems = cls.load(), {}
        except ConfigurationError as error:
            problems = {_variable(problem): problem for problem in error.problems}
            malformed = {name.lower() for name in problems} & cls.model_fields.keys()
            if not malformed:
                raise
            # Read again without the malformed ones, to see what else is wrong.
            settings = cls(**{name: cls.model_fields[name].default for name in malformed})
        try:
            settings.require_identity()
        except ConfigurationError as error:
            for problem in error.problems:
                problems.setdefault(_variable(problem), problem)
        if problems:
            if problems.keys() == {OWN_URL_VARIABLE, *KEY_VARIABLES}:
                settings.require_node_here()
            raise ConfigurationError([*problems.values()])
        return settings

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Settings:
        """Make settings of `values` (by variable name) only, ignoring the environment and `.env`.

        Raises:
            ConfigurationError: as `load`.
        """
        try:
            return _Explicit.model_validate({name.lower(): value for name, value in values.items()})
        except ValidationError as error:
            raise _configuration_error(error) from None

    def own_keys(self) -> OwnKeys | None:
        """Return this node's key pairs, or None if none of the four variables is set.

        Raises:
            ConfigurationError: lists those that are missing, malformed, or do not fit together.
        """
        return self._keys(KEY_VARIABLES)

    def key_pairs(self) -> tuple[OwnKeys, ...]:
        """Return this node's key pairs, the newest first. There is one, or two while a rotation is under way.

        Raises:
            ConfigurationError: as `own_keys`.
        """
        pairs = (self._keys(KEY_VARIABLES), self._keys(OLD_KEY_VARIABLES))
        return tuple(pair for pair in pairs if pair is not None)

    def key_file(self) -> Path | None:
        """Return the file that the keys come from, and may be changed in, or None if some come from elsewhere."""
        names = {*KEY_VARIABLES, *OLD_KEY_VARIABLES}
        if any(name.upper() in names and value for name, value in os.environ.items()):
            return None
        return ENV_FILE.absolute() if ENV_FILE.exists() else None

    def _keys(self, names: Sequence[str]) -> OwnKeys | None:
        values = {name: plain(getattr(self, name.lower())) for name in names}
        missing = {name for name, value in values.items() if value is None}
        if missing == values.keys():
            return None
        signing_public, signing_secret, encryption_public, encryption_secret = (
            value or "" for value in values.values()
        )
        try:
            return OwnKeys.from_base64(
                signing_public=signing_public,
                signing_secret=signing_secret,
                encryption_public=encryption_public,
                encryption_secret=encryption_secret,
            )
        except KeyMaterialError as error:
            renamed = dict(zip(KEY_VARIABLES, names, strict=True))
            told = [(renamed[_variable(problem)], problem) for problem in error.problems]
            wrong = [name + problem.removeprefix(_variable(problem)) for name, problem in told if name not in missing]
            raise ConfigurationError([*_not_set(missing), *wrong]) from None

    def require_node_here(self) -> None:
        """Check that there is a `.env` or a database in this directory, or that the environment names a database.

        Raises:
            NoNodeHere: there is nothing.
        """
        if not ("database_url" in self.model_fields_set or ENV_FILE.exists() or _absent(self.database_url) is None):
            raise NoNodeHere(Path.cwd())

    def require_files(self) -> None:
        """Check that the SQLite databases to work with exist. Opening a missing one would create it.

        Raises:
            NoNodeHere: see `require_node_here`.
            ConfigurationError: names each that does not exist.
        """
        self._require_files({"DATABASE_URL": self.database_url, "QUEUE_URL": self.queue_url})

    def require_database(self) -> None:
        """Check as `require_files` does, but leave the queues, which tell by themselves what they lack.

        Raises:
            NoNodeHere, ConfigurationError: as `require_files`.
        """
        self._require_files({"DATABASE_URL": self.database_url})

    def _require_files(self, named: Mapping[str, SecretStr | None]) -> None:
        self.require_node_here()
        absent = {variable: file for variable, url in named.items() if (file := _absent(url))}
        if absent:
            raise ConfigurationError(
                [f"{variable}: there is no database {file}; go to the node's folder, or make it by `federation init`, "
                 "or by `federation upgrade` if the settings are there"
                 for variable, file in absent.items()]
            )  # fmt: skip

    def require_identity(self) -> None:
        """Check that the node's own URL and keys are set, as delivering and serving need.

        Raises:
            ConfigurationError: lists everything that is missing or wrong.
        """
        problems = [] if self.better_auth_url else [f"{OWN_URL_VARIABLE}: not set; it is this node's own URL"]
        try:
            if self.own_keys() is None:
                problems += _not_set(KEY_VARIABLES)
        except ConfigurationError as error:
            problems += error.problems
        if problems:
            raise ConfigurationError(problems)


OWN_URL_VARIABLE: Final = "BETTER_AUTH_URL"
KEY_VARIABLES: Final = (
    SIGNING_PUBLIC_VARIABLE,
    SIGNING_SECRET_VARIABLE,
    ENCRYPTION_PUBLIC_VARIABLE,
    ENCRYPTION_SECRET_VARIABLE,
)


OLD_KEY_VARIABLES: Final = tuple(name.replace("FEDERATION_", "FEDERATION_OLD_", 1) for name in KEY_VARIABLES)


def _absent(url: SecretStr | None) -> Path | None:
    return None if url is None else absent_file(url.get_secret_value())


def _not_set(names: Collection[str]) -> list[str]:
    return [
        f"{name}: not set; `federation init`, or `keys generate FILE`, makes a set of keys"
        for name in (*KEY_VARIABLES, *OLD_KEY_VARIABLES)
        if name in names
    ]


class _Explicit(Settings):
    """Settings that read nothing but the values they are given."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    def key_file(self) -> None:
        return None


def _configuration_error(error: ValidationError) -> ConfigurationError:
    return ConfigurationError([_problem(each["loc"], each["msg"]) for each in error.errors()])


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"{str(location[0]).upper() if location else 'settings'}: {message.removeprefix('Value error, ')}"


def _variable(problem: str) -> str:
    return problem.partition(":")[0]


def write_env_file(path: Path, values: Mapping[str, str]) -> None:
    """Write a new file `path`, readable only by its owner, with one quoted variable per line.

    Raises:
        FileExistsError: there is such a file; it is left as it is.
        OSError: it cannot be written; then no file is left, rather than one that lacks keys.
    """
    text = "".join(f'{name}="{value}"\n' for name, value in values.items())
    with open(path, "x", encoding="utf-8", opener=_private) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
