"""Changes the code in one place at a time, and reports each change that no test notices.

    scripts/mutate federation/delivery workers/storage/sql/sqlite [--most 40] [--minutes 15] [--seed 1]
    scripts/mutate --simulation [WORDS]

The changes are Cosmic Ray's: another comparison, another number, an inverted condition, a loop that never runs. In each
place one change is tried; another seed chooses other places and other changes. Everything happens in a copy of the
tree, so the checkout stays as it is, however the run ends. The tests are those nearest to the module, see `NEAREST`.
They run once under coverage; then, with each change, those run that reach its line, the quickest first. Ends with 1 if
a change survived. That need not be a fault of the tests: some changes make no difference. Lua and SQL are not changed.

With `--simulation` it tries the bugs of `seeded_bugs` instead, all or those whose names contain one of the words: first
on simulated worlds, then on the nearest tests. See docs/simulation.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData
from seeded import try_all

ROOT: Final = Path(__file__).resolve().parent.parent

CONFORMANCE: Final = "tests/workers/testing/test_conformance.py"
ON_SQLITE: Final = "not (postgres or redis or bull or file)"
"""Most tests of deliveries run on a database and a queue of every kind."""


def only(storage: str) -> str:
    """Return an expression that keeps of the conformance suite only the cases for this storage."""
    return f"not test_conformance or -{storage}]"


NEAREST: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    **{
        f"workers/storage/{name}/*": ((CONFORMANCE, f"tests/workers/storage/{name}"), only(name))
        for name in ("memory", "file", "redis", "bullmq", "bull")
    },
    "workers/storage/sql/postgres/*": (
        (CONFORMANCE, "tests/workers/storage/sql"),
        f"not sqlite and ({only('postgres')})",
    ),
    "workers/storage/sql/*": ((CONFORMANCE, "tests/workers/storage/sql"), f"not postgres and ({only('sqlite')})"),
    "workers/storage/*": ((CONFORMANCE, "tests/workers/storage"), only("redis")),
    "workers/testing/*": (("tests/workers/testing",), only("memory")),
    "workers/worker/*": (("tests/workers/worker",), ""),
    "workers/tasks/*": (("tests/workers/tasks",), ""),
    "workers/*": (("tests/workers/test_*.py", "tests/workers/worker"), ""),
    "federation/*/*": ((), ON_SQLITE),
    "federation/*": (("tests/federation/test_*.py",), ON_SQLITE),
    "*": ((), ""),
}
"""By the first pattern that fits a module: its tests, and pytest's `-k`, which chooses among them.

If no tests are named, they are in the folder that mirrors the module's.
"""

VAIN: Final = re.compile("BitOr|Mul_Div$|_Is(Not)?(_|$)")
"""Operators whose changes are not informative.

`|` nearly always joins types, `*` to `/` concerns parameters, and `is` to `==` or back changes little.
"""

PATIENCE: Final = 3
"""How many times as long tests may take with a change as without; then their run is ended."""

LONGEST_SECONDS: Final = 3600.0
"""The longest duration of a run without a change."""

COVERAGE: Final = "[run]\nsource = workers,federation,db\nconcurrency = thread,greenlet\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: the `occurrence`-th that the operator can make in the module."""

    module: str
    line: int
    column: int
    operator: str
    occurrence: int

    def code(self, original: str) -> str:
        return str(mutate_code(original, get_operator(self.operator)(), self.occurrence))


def main() -> None:
    """Try one mutant after the other until there are no more, or as many as wanted, or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="packages or modules, from the repository's root")
    parser.add_argument("--simulation", action="store_true", help="try seeded bugs on simulated worlds")
    parser.add_argument("--most", type=int, default=40, metavar="N", help="changes to try (40)")
    parser.add_argument("--minutes", type=float, default=15, metavar="M", help="begin with no other change after (15)")
    parser.add_argument("--seed", type=int, default=1, help="chooses among the changes (1)")
    arguments = parser.parse_args()
    if arguments.simulation:
        sys.exit(try_all(arguments.paths))
    if not arguments.paths:
        parser.error("name packages or modules, or use --simulation")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started and copied is removed
    mutants = mutants_of(modules(arguments.paths), arguments.seed)
    print(f"{len(mutants)} places to change, of which at most {arguments.most} are tried", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as directory:
        tally = try_out(mutants[: arguments.most], Tree(Path(directory)), minutes=arguments.minutes)
    print(f"{tally['killed']} killed, {tally['survived']} survived, {tally['timeout']} timeout")
    sys.exit(tally["survived"] > 0)


def modules(paths: Sequence[str]) -> list[str]:
    places = [(ROOT / path).resolve() for path in paths]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
    return sorted({file.relative_to(ROOT).as_posix() for file in files})


def mutants_of(modules: Sequence[str], seed: int) -> list[Mutant]:
    """Return one mutant for each place, in random order."""
    mutants = [mutant for module in modules for mutant in all_mutants(module, (ROOT / module).read_text())]
    random.Random(seed).shuffle(mutants)  # noqa: S311 - no secret
    return list({(mutant.module, mutant.line, mutant.column): mutant for mutant in mutants}.values())


def all_mutants(module: str, original: str) -> Iterator[Mutant]:
    """Yield every mutant, except those of dataclass options: tests need not show that they are frozen or slotted."""
    nodes = list(ast_nodes(get_ast(original)))
    lines = original.splitlines()
    for name in filter(telling, operator_names()):
        operator = get_operator(name)()
        places = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(places):
            if lines[line - 1].lstrip().startswith("@dataclass"):
                continue
            yield Mutant(module=module, line=line, column=column, operator=name, occurrence=occurrence)


def telling(operator: str) -> bool:
    """Tell whether to use the operator. Those that take arguments would need names of variables."""
    turned_round = operator.endswith(("_Is_IsNot", "_IsNot_Is"))
    return not get_operator(operator).arguments() and (turned_round or VAIN.search(operator) is None)


def try_out(mutants: Sequence[Mutant], tree: Tree, *, minutes: float) -> Counter[str]:
    """Try the mutants, and count the verdicts. Each survivor is printed as soon as it is known."""
    end = time.monotonic() + 60 * minutes
    tally: Counter[str] = Counter()
    for mutant in mutants:
        original = (ROOT / mutant.module).read_text()
        code = mutant.code(original)
        if time.monotonic() > end:
            break
        if runs_alike(original, code):
            continue
        tally[verdict := tree.verdict(mutant, code)] += 1
        if verdict != "killed":
            print(f"{verdict}: {mutant.module}:{mutant.line}", *changed_lines(original, code), sep="\n    ", flush=True)
    return tally


def runs_alike(original: str, code: str) -> bool:
    """Tell whether the change concerns annotations, what `zip` checks, or a `*` that leaves no valid program."""
    try:
        return effective(code) == effective(original)
    except SyntaxError:
        return True


def effective(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
    return ast.dump(tree)


def changed_lines(original: str, code: str) -> list[str]:
    lines = difflib.unified_diff(original.splitlines(), code.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


class Tree:
    """A copy of the tree, and the tests in it."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o755)  # PostgreSQL, which runs as another user if we are root, has its data below it
        self._directory = directory
        self._tree = directory / "tree"
        shutil.copytree(ROOT, self._tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "node_modules"))
        (directory / "tmp").mkdir()
        (directory / "coveragerc").write_text(COVERAGE)
        self._environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": str(self._tree),
            "PYTHONPYCACHEPREFIX": str(directory / "cache"),
            "TMPDIR": str(directory / "tmp"),
        }
        self._suites: dict[tuple[str, ...], Suite] = {}
        self._changes = 0

    def verdict(self, mutant: Mutant, code: str) -> str:
        """Test the module with this code, and return the verdict: killed, survived, or timeout."""
        suite = self._suite(mutant.module)
        tests = suite.reaching(self._tree / mutant.module, mutant.line)
        if not tests:
            return "survived"
        (self._directory / "tests").write_text("\n".join(tests))
        file = self._tree / mutant.module
        original = file.read_bytes()
        try:
            file.write_text(code)
            # Bytecode is cached by the file's size and its time in seconds, which two changes may have in common.
            self._changes += 1
            os.utime(file, (self._changes, self._changes))
            status = self._run(["-x", f"@{self._directory / 'tests'}"], PATIENCE * suite.expected(tests))
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            file.write_bytes(original)
        return "killed" if status else "survived"

    def _suite(self, module: str) -> Suite:
        patterns, some = next(tests for fitting, tests in NEAREST.items() if fnmatch(module, fitting))
        paths = [str(found) for pattern in patterns for found in sorted(self._tree.glob(pattern))]
        selection = (*(paths or [str((Path("tests") / module).parent)]), "-k", some)
        if selection not in self._suites:
            self._suites[selection] = self._measured(selection)
        return self._suites[selection]

    def _measured(self, selection: Sequence[str]) -> Suite:
        coverage = self._directory / f"coverage-{len(self._suites)}"
        self._environment["COVERAGE_FILE"] = str(coverage)
        measuring = ["--cov", f"--cov-config={self._directory / 'coveragerc'}", "--cov-context=test", "--cov-report="]
        began = time.monotonic()
        if self._run(["--durations=0", "-vv", *measuring, *selection], LONGEST_SECONDS) > 1:
            sys.exit(f"the tests do not run:\n{self._output.read_text()[-4000:]}")
        took = time.monotonic() - began
        suite = Suite(coverage, self._output.read_text(), took)
        told = " ".join(selection).replace(f"{self._tree}/", "")
        print(f"{len(suite.seconds)} tests in {took:.0f} s: {told}", flush=True)
        for test in suite.failing:
            print(f"left out, as it fails without a change: {test}", flush=True)
        return suite

    @property
    def _output(self) -> Path:
        return self._directory / "output"

    def _run(self, arguments: Sequence[str], seconds: float) -> int:
        options = ["--full", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        with self._output.open("w") as output:
            run = subprocess.Popen(
                command,
                cwd=self._tree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return run.wait(seconds)
        finally:  # the servers are not in its group, and end when it does
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


class Suite:
    """Which tests reach which line, and how long each takes."""

    def __init__(self, coverage: Path, output: str, took: float) -> None:
        self._data = CoverageData(str(coverage))
        self._data.read()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for seconds, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", output, re.MULTILINE):
            self.seconds[test] += float(seconds)
        self._start = took - sum(self.seconds.values())
        self.failing = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        for test in self.failing:
            self.seconds.pop(test, None)

    def expected(self, tests: Iterable[str]) -> float:
        """Return the seconds that these tests took, together with what comes before and after them."""
        return self._start + sum(self.seconds[test] for test in tests)

    def reaching(self, file: Path, line: int) -> list[str]:
        """Return the tests that reach the line, the quickest first.

        For a line that runs when the module is imported, these are the tests that reach anything in it.
        """
        contexts = self._data.contexts_by_lineno(str(file))
        own = contexts.get(max((one for one in contexts if one <= line), default=0), [])
        reaching = own if any(own) else [context for some in contexts.values() for context in some]
        tests = {context.rpartition("|")[0] for context in reaching} & self.seconds.keys()
        return sorted(tests, key=self.seconds.__getitem__)


if __name__ == "__main__":
    main()
