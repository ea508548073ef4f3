"""Which extra of the distribution has a package that is not installed."""

from __future__ import annotations

from typing import Final

PACKAGES: Final = {
    "aiosqlite": ("sqlite",),
    "argon2": ("dashboard",),
    "bullmq": ("bullmq",),
    "fastapi": ("node", "dashboard"),
    "hypothesis": ("testing",),
    "jinja2": ("dashboard", "analytics"),
    "msgpack": ("redis",),
    "obstore": ("stores",),
    "opentelemetry": ("otel",),
    "prometheus_client": ("metrics",),
    "psycopg": ("postgres",),
    "py4j": ("analytics",),
    "pyarrow": ("analytics",),
    "pyspark": ("analytics",),
    "redis": ("bullmq", "redis"),
    "sqlalchemy": ("sqlite", "postgres"),
    "starlette": ("node", "dashboard"),
    "uvicorn": ("node", "dashboard"),
}
"""By the name that is imported: the extras that have it, first the one to name where nothing else is known."""
OURS: Final = frozenset({"db", "federation", "workers"})


def extra_with(missing: ModuleNotFoundError, *, part: str | None = None) -> str | None:
    """Return the extra that has the missing package.

    Of several extras it is that of the `part` which asked. A package that no extra names was required by another one,
    probably of the same part. None if nothing is known, and for a module of ours, which no extra brings back.
    """
    package = (missing.name or "").partition(".")[0]
    if not package or package in OURS:
        return None
    having = PACKAGES.get(package, ())
    return having[0] if having and part not in having else part


def install(extra: str) -> str:
    """Return the command that installs the extra."""
    return f"pip install 'federation-delivery[{extra}]'"
