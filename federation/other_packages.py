"""Tells the packages `db` and `workers` that are installed with this one from an application's own of the same name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Final

from federation.interrupts import is_command

_MARKS: Final = {"db": ("deliveries", "follows", "scheduling"), "workers": ("kv", "middlewares", "storage")}
"""Modules of our packages, not all of which another application's package contains.

Where the packages lie says nothing: it may be another folder than ours, a zip file, or no place that a path could
name. Neither is `__init__.py` used: reading it would import all of SQLAlchemy.
"""


def refuse_foreign() -> None:
    """Check that `db` and `workers` are ours, or do not exist at all. They are not imported for that.

    Raises:
        ImportError: an application's own module has one of the names. The `federation` command ends with one line.
    """
    foreign = {name: place for name in _MARKS if (place := _foreign(name)) is not None}
    if not foreign:
        return
    found = " and ".join(f"`{name}` is {place}" for name, place in foreign.items())
    problem = (
        f"{found}, in the place of federation's own package of that name: rename what the application calls so, or owe "
        "deliveries from a process of its own that does not have it on sys.path"
    )
    if is_command():
        from federation.cli.problems import (
            fail,
        )  # here: only a refused command needs it

        fail(problem)
    raise ImportError(problem)


def _foreign(name: str) -> str | None:
    """Return where the module lies that `import name` would give, or None if it is ours."""
    module = sys.modules.get(name)
    if module is not None:
        place, inside = getattr(module, "__file__", None), getattr(module, "__path__", None)
    else:
        spec = _find(name)
        if spec is None:
            return None
        place, inside = spec.origin, spec.submodule_search_locations
    if inside is not None and all(_find(f"{name}.{mark}", inside) for mark in _MARKS[name]):
        return None
    return str(place or next(iter(inside or ()), "a module without a file"))


def _find(name: str, path: Iterable[str] | None = None) -> ModuleSpec | None:
    """Find the module as `import` does; `importlib.util.find_spec` would import the package around `name` first."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)  # `import` skips finders without it, too
        spec: ModuleSpec | None = find_spec(name, path) if find_spec else None
        if spec is not None:
            return spec
    return None
