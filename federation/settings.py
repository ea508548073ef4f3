"""The one reader of the environment: every setting, its default and what it means.

Values come from the environment, then from a `.env` file in the working directory. Nothing here raises over a missing
value by itself: `Settings.require_*` tells an entry point everything it lacks at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from federation.errors import ConfigurationError
from federation.http.guard import parse_allowed_hostnames
from federation.protocol.errors import KeyMaterialError, UrlError
from federation.protocol.keys import OwnKeys
from federation.protocol.urls import canonical_origin

DEFAULT_DATABASE_URL: Final = "sqlite:///federation.sqlite3"

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>ms|s|m|h|d)?")


def parse_duration(value: object) -> timedelta:
    """The duration in `250ms`, `5s`, `10m`, `2h`, `7d`; a bare number is seconds.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, timedelta):
        return value
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("write a duration as 250ms, 5s, 10m, 2h or 7d")
    return timedelta(seconds=float(match["number"]) * _UNITS[match["unit"] or "s"])


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("must be longer than nothing")
    return value


def _own_origin(value: str) -> str:
    try:
        return canonical_origin(value)
    except UrlError as error:
        raise ValueError(f"must be this node's own URL, as https://node.example: {error}") from None


Duration = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_positive)]


def _hostnames(value: object) -> object:
    return parse_allowed_hostnames(value) if isinstance(value, str) else value


Hostnames = Annotated[frozenset[str], BeforeValidator(_hostnames)]


class Settings(BaseSettings):
    """Everything that can be set. Field names in upper case are the variables' names."""

    model_config = SettingsConfigDict(
        env_file=".env",
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        enable_decoding=False,
    )

    better_auth_url: Annotated[str, AfterValidator(_own_origin)] | None = None
    """This node's own URL, under which other servers know and reach it."""
    federation_public_key: str | None = None
    federation_private_key: SecretStr | None = None
    federation_encryption_public_key: str | None = None
    federation_encryption_private_key: SecretStr | None = None
    database_url: SecretStr = SecretStr(DEFAULT_DATABASE_URL)
    redis_url: SecretStr | None = None
    """Where BullMQ's queues live; unset, the queues live in the application's SQLite database."""
    queue_url: SecretStr | None = None
    """Picks another queue storage by its scheme; wins over REDIS_URL."""
    dev_allowed_hostnames: Hostnames = frozenset()
    """Hosts exempt from the ban on private and loopback addresses: `host`, `host:port` or a URL, comma-separated."""
    federation_bind: str = "127.0.0.1"
    federation_port: Annotated[int, Field(ge=1, le=65535)] = 8000

    federation_queue_prefix: Annotated[str, Field(min_length=1, max_length=100)] = "bull"
    federation_delivery_attempts: Annotated[int, Field(ge=1, le=100)] = 5
    federation_delivery_backoff: Duration = timedelta(seconds=5)
    """The first pause between two attempts; each further one is twice as long."""
    federation_delivery_concurrency: Annotated[int, Field(ge=1, le=1000)] = 10
    federation_health_concurrency: Annotated[int, Field(ge=1, le=1000)] = 3
    federation_health_first_delay: Duration = timedelta(minutes=5)
    federation_health_step: Duration = timedelta(minutes=10)
    federation_health_checks: Annotated[int, Field(ge=1, le=100)] = 5
    federation_lease: Duration = timedelta(seconds=30)
    federation_grace: Duration = timedelta(seconds=20)
    federation_per_server: Annotated[int, Field(ge=1, le=1000)] = 3
    """Attempts at one server at once, per process."""
    federation_max_stalls: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often a delivery may lose its worker before it counts as failed."""

    @classmethod
    def load(cls) -> Self:
        """The settings of this process: its environment, then `.env`.

        Raises:
            ConfigurationError: lists every malformed value, by its variable's name and never by its content.
        """
        try:
            return cls()
        except ValidationError as error:
            raise _malformed(error) from None

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Settings:
        """Settings made of `values` (by variable name) alone, whatever the environment and `.env` hold.

        Raises:
            ConfigurationError: as `load`.
        """
        try:
            return _Explicit.model_validate({name.lower(): value for name, value in values.items()})
        except ValidationError as error:
            raise _malformed(error) from None

    def own_keys(self) -> OwnKeys | None:
        """This node's key pairs, None while none of the four variables is set.

        Raises:
            ConfigurationError: some are missing, or they do not fit together.
        """
        problems = self._missing_keys()
        if len(problems) == len(_KEY_VARIABLES):
            return None
        if problems:
            raise ConfigurationError(problems)
        assert self.federation_public_key is not None
        assert self.federation_private_key is not None
        assert self.federation_encryption_public_key is not None
        assert self.federation_encryption_private_key is not None
        try:
            return OwnKeys.from_base64(
                signing_public=self.federation_public_key,
                signing_secret=self.federation_private_key.get_secret_value(),
                encryption_public=self.federation_encryption_public_key,
                encryption_secret=self.federation_encryption_private_key.get_secret_value(),
            )
        except KeyMaterialError as error:
            raise ConfigurationError(error.problems) from None

    def require_identity(self) -> None:
        """A URL and keys of its own are set, as delivering and serving need.

        Raises:
            ConfigurationError: lists everything that is missing or wrong.
        """
        problems = [] if self.better_auth_url else ["BETTER_AUTH_URL: not set; it is this node's own URL"]
        try:
            if self.own_keys() is None:
                problems += self._missing_keys()
        except ConfigurationError as error:
            problems += error.problems
        if problems:
            raise ConfigurationError(problems)

    def _missing_keys(self) -> list[str]:
        return [
            f"{name.upper()}: not set; `federation init` makes a set of keys"
            for name in _KEY_VARIABLES
            if getattr(self, name) is None
        ]


_KEY_VARIABLES: Final = (
    "federation_public_key",
    "federation_private_key",
    "federation_encryption_public_key",
    "federation_encryption_private_key",
)


class _Explicit(Settings):
    """Settings that read nothing but what they are given."""

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


def _malformed(error: ValidationError) -> ConfigurationError:
    return ConfigurationError([_problem(each["loc"], each["msg"]) for each in error.errors()])


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"{str(location[0]).upper() if location else 'settings'}: {message.removeprefix('Value error, ')}"


def write_env_file(path: Path, values: Mapping[str, str]) -> None:
    """`path` is a new file, readable by its owner alone, with one quoted variable per line.

    Raises:
        FileExistsError: there is such a file; it is left as it is.
    """
    text = "".join(f'{name}="{value}"\n' for name, value in values.items())
    with open(path, "x", encoding="utf-8", opener=_private) as file:
        file.write(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
