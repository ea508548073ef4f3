"""Which modules of the application write which columns: read from their source, and as the models' comments say.

Seen in the source are statements (`update(TABLE).values(...)`, also where their parts have names) and rows that are
made as objects. What a statement does not tell, as the columns of `execute(insert(TABLE), rows)`, counts as a write of
the whole row.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from sqlalchemy import Table
from sqlalchemy.sql.dml import UpdateBase

import db
from db.columns import FederationTable

ROOT: Final = Path(db.__file__).parents[1]
VERB: Final = re.compile(r"_?(insert|update|delete)")
VALUES: Final = {"values", "on_conflict_do_update"}
MODULE: Final = re.compile(
    r"\bretention\b|\b(?:activitypub|admin|analytics/data|base|delivery|node|rollups|runtime|scheduler|sealed|servers)(?:/\w+)+"
)
ORIGINAL: Final = "the original"
"""Stands for the Node implementation, whose code is not here."""
DEEP: Final = 3
"""Names that stand for names, followed so far."""

Writers = Mapping[str, Mapping[str, set[str]]]
"""By table, and by column, the modules as `delivery/outbox/insert`; the column `*` is the whole row."""


def writers() -> Writers:
    """Who writes what, in all of `federation`."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted((ROOT / "federation").rglob("*.py")):
        text = path.read_text()
        if re.search(r"\b(insert|update|delete)\(|session\.add|\bfrom db import", text):
            name = path.relative_to(ROOT).with_suffix("").as_posix()
            for table, column in set(_Scan(import_module(name.replace("/", ".")), ast.parse(text)).writes()):
                found[table][column].add(name.removeprefix("federation/"))
    return found


class _Scan:
    """One module. Names are looked up in the module itself, so that what a constant holds is known."""

    def __init__(self, module: ModuleType, tree: ast.Module) -> None:
        self._names = vars(module)
        self._tree = tree
        self._assigned: dict[str, list[ast.expr]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                self._assigned[target.id].append(node.value)

    def writes(self) -> Iterator[tuple[str, str]]:
        for call in (node for node in ast.walk(self._tree) if isinstance(node, ast.Call)):
            if table := self._made(call):
                yield table, "*"
                yield from ((table, keyword.arg) for keyword in call.keywords if keyword.arg)
            elif table := self._stated(call):
                yield table, "*"
            elif table := self._valued(call):
                yield from ((table, column) for column in self._columns(call))

    def _made(self, call: ast.Call) -> str | None:
        """The table of a row that is made as an object."""
        return _table(self._value(call.func)) if isinstance(call.func, ast.Name) else None

    def _stated(self, call: ast.Call) -> str | None:
        """The table of `insert(TABLE)` and its like."""
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        return _table(self._value(call.args[0])) if VERB.fullmatch(name) and call.args else None

    def _valued(self, call: ast.Call) -> str | None:
        """The table of the statement that gets `.values(...)`."""
        is_values = isinstance(call.func, ast.Attribute) and call.func.attr in VALUES
        return self._below(call.func) if is_values else None

    def _below(self, expression: ast.expr, depth: int = 0) -> str | None:
        """The table of the statement that a chain of calls begins with, or of a name that is one."""
        for node in ast.walk(expression):
            if isinstance(node, ast.Call) and (table := self._stated(node)):
                return table
            if isinstance(node, ast.Name):
                value = self._names.get(node.id)
                if isinstance(value, UpdateBase):
                    return str(value.table)
                for assigned in self._assigned[node.id] if depth < DEEP else ():
                    if table := self._below(assigned, depth + 1):
                        return table
        return None

    def _columns(self, call: ast.Call) -> Iterator[str]:
        """What is given by name, and the keys of what is given as a mapping."""
        for keyword in call.keywords:
            if keyword.arg in (None, "set_"):
                yield from self._keys(keyword.value)
            elif keyword.arg not in ("index_elements", "where"):
                yield keyword.arg or ""
        for argument in call.args:
            yield from self._keys(argument)

    def _keys(self, expression: ast.expr) -> Iterator[str]:
        if isinstance(given := self._value(expression), Mapping):
            yield from given
            return
        places = [
            expression,
            *(each for node in ast.walk(expression) if isinstance(node, ast.Name) for each in self._assigned[node.id]),
        ]
        for node in (node for place in places for node in ast.walk(place)):
            if isinstance(node, ast.Dict):
                yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))

    def _value(self, expression: ast.expr) -> object:
        """What it is where the module was imported; None for what only a call knows."""
        try:
            return eval(ast.unparse(expression), dict(self._names))
        except Exception:  # of any kind: it was written for other names than a module has
            return None


def _table(value: object) -> str | None:
    table = value if isinstance(value, Table) else getattr(value, "__table__", None)
    return table.name if isinstance(table, Table) else None


def commented() -> Writers:
    """What the models say: each comment `# Written by ...` is about the columns below it, down to the next one."""
    found: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for path in sorted((ROOT / "db").glob("*.py")):
        table, modules = "", set[str]()
        for line in re.sub(r"(# Written by .*)\n    # ", r"\1 ", path.read_text()).splitlines():
            if named := re.match(r'    __tablename__ = "(\w+)"', line):
                table, modules = named[1], set()
            elif line.startswith("    # Written by "):
                modules = set(MODULE.findall(line)) or ({ORIGINAL} if ORIGINAL in line else set())
            elif (column := re.match(r"    (\w+): ", line)) and table in FederationTable.metadata.tables:
                found[table][column[1]] = modules
            elif line.startswith("class "):
                table = ""
    return found


def column_table(table: str) -> str:
    """What the README shows: the columns that have the same writers, in one row."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for column, modules in commented()[table].items():
        rows[tuple(sorted(modules))].append(f"`{column}`")
    lines = [
        f"| {', '.join(columns)} | {', '.join(f'`{each}`' for each in modules)} |" for modules, columns in rows.items()
    ]
    return "\n".join([f"| columns of `{table}` | written by |", "|---|---|", *lines])
