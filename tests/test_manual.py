"""What the manual shows to be typed is there. That its programs run is shown by `scripts/smoke`, from the wheel."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from federation.analytics.cli import make_parser
from federation.analytics.errors import AnalyticsError
from tests.federation.deploy.commands import refusal, unknown_variables
from tests.workers.test_migration import PEERS as MOVES

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(
    r"(?P<set>(?:[A-Z_]+=\S+ +)*)(?:/\S+/)?"
    r"(?:(?P<federation>federation)(?= )|(?:python3? )?(?P<script>scripts/[\w./]+)|python3? -m (?P<module>[\w.]+))"
    r"(?P<rest>| .*)"
)
SOURCES = (
    *("scripts", "tests/chaos", "tests/security", "tests/simulation", "tests/conftest.py"),
    *("workers/testing", "workers/command", "federation/analytics"),
)
"""Where the options of our scripts are declared."""
PYTESTS = {"-k", "--help", "--durations"}
"""Options that are declared elsewhere."""


def _load() -> ModuleType:
    spec = spec_from_file_location("manual", ROOT / "scripts" / "manual.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["manual"] = module_from_spec(spec)  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


manual = _load()


def shown(page: str) -> Iterator[str]:
    """Every line of its blocks, and every `code` between its words, of which `a|b` is two."""
    for block in manual.blocks(page):
        if block.language in ("", "sh"):
            text = block.text.replace("\\\n", " ")
            yield from (line.strip() for line in re.findall(r"^ *\$ (.*)", text, re.M) or text.splitlines())
    for code in re.findall(r"(?<!`)`([^`…]+)`", (ROOT / page).read_text()):
        words = code.split()
        if len(words) < 20:
            yield from (" ".join(each) for each in product(*(word.split("|") for word in words)))


def commands() -> list[tuple[str, str]]:
    """Each of ours, and the page it is on."""
    lines = {(page, line) for page in manual.pages() for line in shown(page)}
    return sorted((page, line) for page, line in lines if COMMAND.fullmatch(line) and not is_of_a_commit(page, line))


def is_of_a_commit(page: str, line: str) -> bool:
    """Whether the page says that it ran at a commit, as its program is there no more: beside it, or above its block."""
    text = (ROOT / page).read_text()
    name = re.escape(line)
    beside = re.search(rf"(?m)^.*(?:{name}.*\bat [0-9a-f]{{8}}\b|\bat [0-9a-f]{{8}}\b.*{name})", text)
    above = re.search(rf"up to commit [0-9a-f]{{8}}:\n\n(?: {{4}}.*\n)*? {{4}}{re.escape(line)}\n", text)
    return bool(beside or above or re.search(r"\bat [0-9a-f]{8}\b", line))


def complaint(line: str) -> str | None:
    """What is wrong with it, by the program that it calls."""
    found = COMMAND.fullmatch(line)
    assert found is not None
    arguments = [word.strip("[]") for word in shlex.split(found["rest"].removesuffix("&"), comments=True)]
    if unknown := unknown_variables(re.findall(r"([A-Z_]+)=", found["set"])) - {"PYTHONPATH"}:
        return f"no setting is called {unknown}"
    if found["federation"]:
        return refusal(arguments) if arguments[0] != "analytics" else refusal_of_analytics(arguments[1:])
    if found["script"] and not (ROOT / found["script"]).exists():
        return f"there is no {found['script']}"
    if found["module"] and find_spec(found["module"]) is None:
        return f"there is no module {found['module']}"
    if (found["module"] or "").split(".")[0] in ("pip", "venv"):
        return None
    options = {word.partition("=")[0] for word in arguments if word.startswith("-")} - PYTESTS
    return next((f"no program of ours has {option}" for option in options if f'"{option}"' not in declared()), None)


def refusal_of_analytics(arguments: Sequence[str]) -> str | None:
    """Its commands parse their own arguments; all of them need `--out`, which some places leave out."""
    try:
        make_parser().parse_args([*arguments, "--out", "there"])
    except AnalyticsError as error:
        return str(error)
    return None


@cache
def declared() -> str:
    """The text of all programs that have options."""
    paths = [ROOT / source for source in SOURCES]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_of_the_manual_is_taken(page: str, line: str) -> None:
    """By what it calls, with all its options; and variables that are set for it are settings."""
    assert complaint(line) is None


def test_a_page_is_run(tmp_path: Path) -> None:
    """As `scripts/smoke` runs all of them."""
    manual.run("db/README.md", tmp_path)
    assert (tmp_path / "node.db").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [("1 / 0", "status 1"), ("import sys\nprint(1, file=sys.stderr)", "on stderr"), ("open('x')", "on stderr")],
)
def test_a_program_that_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    """It fails, or complains, or leaves something open."""
    block = manual.Block("page.md", "Title", 7, "python", text)
    (tmp_path / "x").touch()
    with manual.Reader(tmp_path) as reader, pytest.raises(manual.Untrue, match=rf"^page\.md:7 .*{told}"):
        reader.program(block)


WORKS = """\
from workers import Tasks

app = Tasks("sqlite:///jobs.db")

@app.task
async def begin() -> None:
    print("begun")

begin.sync.enqueue()
"""


@pytest.mark.parametrize(
    ("between", "told"),
    [
        ("", None),
        ("import logging, sys; logging.basicConfig(); logging.warning('odd')\n", "status 0, and says.*odd"),
        ("raise SystemExit(3)\n", "status 3"),
    ],
    ids=["works", "warns", "fails"],
)
def test_a_program_that_works_until_ctrl_c_gets_one(tmp_path: Path, between: str, told: str | None) -> None:
    """It may log what it does, and nothing else."""
    block = manual.Block("page.md", "Title", 7, "python", f"{WORKS}{between}app.run()\n")
    with manual.Reader(tmp_path) as reader:
        if told is None:
            reader.program(block)
            return
        with pytest.raises(manual.Untrue, match=rf"(?s)^page\.md:7 ends with {told}"):
            reader.program(block)


@pytest.mark.parametrize("app", ["django", "fastapi", "flask"])
def test_an_example_is_asked_as_shown(app: str) -> None:
    """Where it listens unless it is told otherwise, for what it reads."""
    (block,) = manual.blocks("docs/examples/README.md")
    program, *fields, url = [word for word in shlex.split(block.text) if word != "-d"]
    origin, _, path = url.rpartition("/")
    assert (program, origin) == ("curl", "http://127.0.0.1:5000")
    text = (ROOT / "docs" / "examples" / f"{app}_app.py").read_text()
    assert re.search(rf'["/]{path}"', text)
    assert '"PORT", "5000"' in text
    assert [field for field, _, _ in (each.partition("=") for each in fields) if f'["{field}"]' not in text] == []


def test_the_manual_is_read() -> None:
    """Commands that nobody finds are taken by everybody; and a page without programs has none to run."""
    assert len(commands()) > 80
    first = {line for page, line in commands() if page in ("README.md", "docs/operate/day.md")}
    assert first > {"federation doctor", "federation why URL"}
    programs = {block.page for page in manual.pages() for block in manual.blocks(page) if block.language == "python"}
    readmes = {
        *("README.md", "docs/embed/plain-code.md", "docs/embed/tasks.md"),
        *(f"{folder}/README.md" for folder in ("db", "federation/analytics", "workers")),
    }
    queue = {
        f"docs/queue/{page}.md"
        for page in (
            *("commands", "dependencies", "enqueueing", "failed", "handlers", "limits", "recurring", "storages"),
            "tasks",
        )
    }  # see tests/workers/test_readme.py
    moves = {f"docs/migration/{peer}.md" for peer in MOVES}
    others = {"docs/opentelemetry.md", "docs/testing.md", "workers/recipes.md", "workers/storage/bull/PROTOCOL.md"}
    assert programs == {*readmes, *queue, *moves, *others}
    assert set(manual.readmes()) >= readmes


@pytest.mark.parametrize(
    "wrong",
    [
        "federation deliveries retri",
        "federation why URL --jsn",
        "FEDERATION_TASK=digests federation run",
        "federation analytics run --aut there",
        "scripts/demos",
        "scripts/chaos --kils 3",
        "python -m workers.test",
    ],
)
def test_what_is_not_there_is_noticed(wrong: str) -> None:
    assert complaint(wrong) is not None
