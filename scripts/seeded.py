"""Bugs that are put into the code on purpose, one at a time, to see who finds them: `scripts/mutate --simulation`.

Theory of operation. A bug edits the syntax tree of one function, or of one constant of a module, which it names; where
that lies is searched for, so moving it loses no bug. Nothing is written: in a process of its own an import hook gives
the module's changed code to whoever imports it. First the simulation tries to find the bug, world by world; on what it
does not find the nearest tests are tried, in which the same hook is a plugin of pytest's.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, cast

ROOT: Final = Path(__file__).resolve().parent.parent
NAMED_BY: Final = "SEEDED_BUG"
"""The environment variable with the name of the bug in a process."""
SEEDS: Final = (328, 326, 50, 206, 72, 177, 159, 362)
"""Worlds that have everything between them, most of it twice, chosen once."""
LONGEST_WORLD: Final = 30.0
"""Seconds of CPU. A world without a bug takes two, some five."""
LONGEST_SECONDS: Final = 1800.0
"""What takes longer does not end, which is a way to fail. A world that is busy ends by its CPU before."""
NEAREST: Final = {
    "federation/delivery/attempt/decision": "delivery/attempt/test_decision delivery/held/test_canaries"
    " delivery/held/test_outage delivery/attempt/test_trouble",
    "federation/delivery/error_codes": "delivery/test_codes delivery/attempt/test_statuses",
    "federation/sealed/codes": "delivery/test_codes delivery/attempt/test_statuses",
    "federation/delivery/attempt/processor": "delivery/held/test_outage delivery/attempt/test_trouble"
    " delivery/ledger/test_attempt_log delivery/attempt/test_blacklist delivery/held/test_canaries"
    " delivery/attempt/test_host_limits",
    "federation/delivery/attempt/host_limits": "delivery/attempt/test_host_limits",
    "federation/delivery/attempt/crash_suspects": "delivery/attempt/test_crash_suspects",
    "federation/delivery/ledger/ledger": "delivery/attempt/test_database_away",
    "federation/delivery/ledger/statements": "delivery/ledger/test_statements delivery/ledger/test_attempt_log"
    " delivery/attempt/test_ends delivery/attempt/test_crash_suspects",
    "federation/delivery/rows": "delivery/held/test_sweeper delivery/held/test_release delivery/outbox/test_ordering",
    "federation/delivery/outbox/ordering": "delivery/outbox/test_ordering sealed/outbound/activities",
    "federation/delivery/outbox/sweeper": "delivery/outbox",
    "federation/delivery/held/sweep_times": "delivery/held/test_sweep_times",
    "federation/delivery/held/sweeper": "delivery/held/test_sweeper delivery/held/test_outage"
    " delivery/attempt/test_crash_suspects",
    "federation/delivery/held/release": "delivery/held/test_release delivery/held/test_canaries",
    "federation/delivery/held/probes": "health delivery/held/test_canaries delivery/attempt/test_misunderstandings",
    "federation/sealed/peers": "health delivery/held/test_canaries delivery/attempt/test_misunderstandings",
    "federation/sealed/outbound": "delivery/attempt/test_misunderstandings delivery/held/test_canaries",
    "federation/servers/link": "servers/test_link_rules servers/test_links delivery/held/test_canaries",
    "federation/scheduler": "scheduler/test_leases scheduler/test_runner",
    "federation/base/database_clock": "base/test_database_clock",
    "workers/worker": "../workers/worker",
}
"""By the beginning of a module's path: tests, from `tests/federation` on."""
CHOSEN: Final = "not (postgres or redis or bull or file)"

Edit = Callable[[ast.AST], ast.AST]


class NotFound(Exception):
    """The code is not as the bug expects it: it has to be written anew."""


@dataclass(frozen=True, slots=True)
class Bug:
    """What is wrong, where (the end of a dotted name), and how."""

    name: str
    where: str
    edit: Edit


def swap(old: str, new: str) -> Edit:
    """Replace an expression, a statement, or an argument such as `at=now`, wherever it stands in the function."""

    def edit(tree: ast.AST) -> ast.AST:
        swapping = _Swapping(_parsed(old), _parsed(new))
        changed = swapping.visit(tree)
        if not swapping.found:
            raise NotFound(f"nothing reads {old!r}")
        return ast.fix_missing_locations(changed)

    return edit


def returns(value: str) -> Edit:
    """Let the function do nothing but return this."""

    def edit(tree: ast.AST) -> ast.AST:
        assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
        tree.body = ast.parse(f"return {value}").body
        return ast.fix_missing_locations(tree)

    return edit


def without(statement: str) -> Edit:
    """Leave a statement out."""
    return swap(statement, "pass")


def _parsed(text: str) -> ast.AST:
    [statement] = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Swapping(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old = ast.dump(old)
        self._new = new
        self.found = 0

    def visit(self, node: ast.AST) -> ast.AST:
        is_statement = isinstance(node, ast.Expr) and ast.dump(node.value) == self._old
        if isinstance(node, ast.keyword) and self._names(node):
            self.found += 1
            assert isinstance(self._new, ast.Assign)
            node.value = self._new.value
            return node
        if is_statement or ast.dump(node) == self._old:
            self.found += 1
            is_value = isinstance(node, ast.stmt) and isinstance(self._new, ast.expr)
            return ast.Expr(cast("ast.expr", self._new)) if is_value else self._new
        return self.generic_visit(node)

    def _names(self, node: ast.keyword) -> bool:
        """Tell whether the argument reads as the assignment that is to be replaced."""
        return ast.dump(ast.Assign([ast.Name(node.arg or "", ast.Store())], node.value)) == self._old


@dataclass(frozen=True, slots=True)
class Place:
    """The module whose code a bug changes, and the definition in it."""

    module: str
    path: Path
    name: str


def place_of(bug: Bug) -> Place:
    """Find the only definition that a bug may mean.

    Raises:
        NotFound: there is none, or there are several.
    """
    places = [place for place in _places() if f"{place.module}.{place.name}".endswith(f".{bug.where}")]
    if len(places) != 1:
        raise NotFound(f"{bug.name}: {bug.where} is defined {len(places)} times: {[each.module for each in places]}")
    return places[0]


@cache
def _places() -> list[Place]:
    files = [file for package in ("federation", "workers") for file in sorted((ROOT / package).rglob("*.py"))]
    return [
        Place(".".join(file.relative_to(ROOT).with_suffix("").parts), file, name)
        for file in files
        for name, _ in _definitions(ast.parse(file.read_text()), "")
    ]


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(tree, ast.FunctionDef):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))


def changed_code(bug: Bug, place: Place) -> CodeType:
    """Compile the module with the bug in it.

    Raises:
        NotFound: the code is not as the bug expects it, or the bug changes nothing.
    """
    tree = ast.parse(place.path.read_text())
    before = ast.dump(tree)
    target = next(node for name, node in _definitions(tree, "") if name == place.name)
    bug.edit(target)
    if ast.dump(tree) == before:
        raise NotFound(f"{bug.name} changes nothing")
    return compile(tree, str(place.path), "exec")


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module its changed code."""

    def __init__(self, place: Place, code: CodeType) -> None:
        self._place = place
        self._code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._place.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self._place.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._place.path)
        exec(self._code, module.__dict__)  # noqa: S102 - our own code, with a bug


def install(bug: Bug) -> None:
    """Give the module with the bug to whoever imports it from now on.

    Raises:
        NotFound: see `place_of` and `changed_code`.
    """
    place = place_of(bug)
    assert place.module not in sys.modules, place.module
    sys.meta_path.insert(0, _Hook(place, changed_code(bug, place)))


def hunt(seeds: Sequence[int]) -> str | None:
    """Run the worlds until one finds something. Return its seed and the first finding; None if none does."""
    import logging

    from federation.runtime.nodes import set_aside_loaded
    from tests.simulation.run import run_seed

    logging.disable()
    set_aside_loaded()
    signal.signal(signal.SIGPROF, _end_the_world)
    for seed in seeds:
        try:
            signal.setitimer(signal.ITIMER_PROF, LONGEST_WORLD, 1.0)
            try:
                findings = run_seed(seed, rush=False).findings
            finally:  # at once: to end a world takes a while, and the next signal would end us
                signal.setitimer(signal.ITIMER_PROF, 0)
        except (Exception, Endless) as error:
            return f"{seed}: {type(error).__name__} {error}"
        if findings:
            return f"{seed}: {findings[0]}"
    return None


class Endless(BaseException):
    """The world takes many times as long as any does without a bug. No `except Exception` of the code takes it."""


def _end_the_world(_signal: int, _frame: object) -> None:
    raise Endless(f"it goes on after {LONGEST_WORLD:.0f} s of CPU")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who found a bug, and what it told; neither if nobody did."""

    bug: Bug
    world: str | None
    tests: str | None = None


def tried(bug: Bug, *, worlds_only: bool) -> Verdict:
    """Try the bug on the worlds, and if they do not find it, on the nearest tests."""
    place = place_of(bug)
    changed_code(bug, place)
    try:
        told = _output([sys.executable, str(Path(__file__)), "hunt"], bug).stdout.strip()
    except subprocess.TimeoutExpired:
        told = "no world ends"
    if told != "None":
        return Verdict(bug, told.splitlines()[-1])
    if worlds_only:
        return Verdict(bug, None)
    options = ["-x", "-q", "--full", "-p", "seeded", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", CHOSEN]
    try:
        done = _output([sys.executable, "-m", "pytest", *options, *_nearest(place)], bug)
    except subprocess.TimeoutExpired:
        return Verdict(bug, None, "they do not end")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return Verdict(bug, None, failed[0].split(" - ")[0] if done.returncode and failed else None)


def _nearest(place: Place) -> Iterator[str]:
    module = str(place.path.relative_to(ROOT))
    for name in next(tests for code, tests in NEAREST.items() if module.startswith(code)).split():
        found = ROOT / "tests/federation" / name
        yield str(found if found.is_dir() else found.with_suffix(".py"))


def _output(command: Sequence[str], bug: Bug) -> subprocess.CompletedProcess[str]:
    """Run the command with the bug, and return how it ends and what it prints.

    Raises:
        TimeoutExpired: it does not end within `LONGEST_SECONDS`.
    """
    environment = {**os.environ, NAMED_BY: bug.name, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    if done.returncode and not done.stdout.strip():
        sys.exit(f"{bug.name}: {done.stderr[-2000:]}")
    return done


def try_all(names: Sequence[str], *, worlds_only: bool = False) -> int:
    """Try the bugs, or those of them that contain one of `names`. Print who found which; 1 if some survived."""
    from seeded_bugs import BUGS

    chosen = [bug for bug in BUGS if not names or any(name in bug.name for name in names)]
    for bug in chosen:
        changed_code(bug, place_of(bug))
    began, verdicts = time.monotonic(), []
    print("| bug | where | found by |\n| --- | --- | --- |", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for verdict in pool.map(partial(tried, worlds_only=worlds_only), chosen):
            verdicts.append(verdict)
            found = f"world {verdict.world}" if verdict.world else verdict.tests or "**survived**"
            print(f"| {verdict.bug.name} | `{verdict.bug.where}` | {found[:160]} |", flush=True)
    worlds = sum(verdict.world is not None for verdict in verdicts)
    survived = sum(verdict.world is None and verdict.tests is None for verdict in verdicts)
    print(
        f"{len(chosen)} bugs: {worlds} found by the simulation, {len(chosen) - worlds - survived} by the nearest tests,"
        f" {survived} survived, in {time.monotonic() - began:.0f} s"
    )
    return int(survived > 0)


def _own_bug() -> Bug:
    from seeded_bugs import BUGS

    return next(bug for bug in BUGS if bug.name == os.environ[NAMED_BY])


if __name__ == "__main__":
    sys.modules["seeded"] = sys.modules["__main__"]
    if sys.argv[1:2] == ["hunt"]:
        install(_own_bug())
        print(hunt(SEEDS))
    else:
        sys.exit(try_all([each for each in sys.argv[1:] if each != "--worlds"], worlds_only="--worlds" in sys.argv))
elif NAMED_BY in os.environ:  # as a plugin of pytest's
    install(_own_bug())
