"""What an application meets whose own modules are called as ours are; each in a process, where nothing is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]

USED = "import federation; federation.transaction; print('used')"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The application's own folder: the working directory, so the first on `sys.path`."""
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


def run(host: Path, *arguments: str, path: Sequence[Path] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONWARNINGS": "error"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=host, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def refused(host: Path) -> str:
    """What a program is told by `import federation`, which does not succeed."""
    done = run(host, "-c", "try: import federation\nexcept ImportError as error: print(error)")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return done.stdout


def single_file(host: Path, name: str) -> Path:
    place = host / f"{name}.py"
    place.write_text("engine = None\n")
    return place


def package(host: Path, name: str) -> Path:
    """As such packages are: with submodules, some of them called as some of ours are."""
    place = host / name
    (place / "migrations").mkdir(parents=True)
    for module in ("__init__", "session", "servers", "deliveries", "queue", "storage", "migrations/__init__"):
        (place / f"{module}.py").touch()
    return place / "__init__.py"


@pytest.mark.parametrize("name", ["db", "workers"])
@pytest.mark.parametrize("make", [single_file, package])
def test_a_foreign_module_is_refused_at_once(host: Path, name: str, make: Callable[[Path, str], Path]) -> None:
    """`import federation` says which file is in the way and what to do."""
    place = make(host, name)
    told = refused(host)
    assert f"`{name}` is {place}, in the place of" in told
    assert "rename what the application calls so, or owe deliveries from a process of its own" in told


def test_both_are_told_at_once(host: Path) -> None:
    """Who renames one module does not learn of the other only then."""
    places = {name: package(host, name) for name in ("db", "workers")}
    assert f"`db` is {places['db']} and `workers` is {places['workers']}, in the place of" in refused(host)


def test_every_import_is_refused(host: Path) -> None:
    """Neither a second try nor a submodule gets past the first refusal."""
    single_file(host, "db")
    program = (
        "import importlib\n"
        "for name in ('federation', 'federation', 'federation.service', 'federation.base.errors'):\n"
        " try: importlib.import_module(name)\n"
        " except ImportError as error: print('rename' in str(error))\n"
    )
    assert run(host, "-c", program).stdout == "True\n" * 4


@pytest.mark.parametrize("make", [single_file, package])
def test_what_is_imported_already_counts(host: Path, make: Callable[[Path, str], Path]) -> None:
    """Later entries of `sys.path` do not matter to a name that is taken."""
    elsewhere = host / "elsewhere"
    elsewhere.mkdir()
    place = make(elsewhere, "db")
    program = (
        f"import sys; sys.path.insert(0, {str(elsewhere)!r}); import db; del sys.path[0]\n"
        "try: import federation\n"
        "except ImportError as error: print(error)\n"
    )
    assert f"`db` is {place}, in the place of" in run(host, "-c", program).stdout


def test_a_module_without_a_file_is_refused(host: Path) -> None:
    """A module that a program made itself has neither a file nor a spec to name."""
    program = "import sys, types; sys.modules['db'] = types.ModuleType('db'); import federation"
    assert "ImportError: `db` is a module without a file, in" in run(host, "-c", program).stderr


def test_a_path_that_changes_later_is_noticed(host: Path) -> None:
    """Between `import federation` and the first use a host's folder may come first on `sys.path`."""
    (host / "source").mkdir()
    place = single_file(host / "source", "workers")
    program = "import federation, sys; sys.path.insert(0, 'source'); federation.transaction"
    told = run(host, "-c", program).stderr.splitlines()[-1]
    assert told.startswith("ImportError: `workers` is ")
    assert str(place.relative_to(host)) in told


def test_a_finder_of_old_is_passed_over(host: Path) -> None:
    """What stands in `sys.meta_path` need not know `find_spec`."""
    old = "import sys; sys.meta_path.insert(0, type('Old', (), {'find_module': lambda *_: None})())\n"
    done = run(host, "-W", "ignore", "-c", old + "import federation; print('imported')")
    assert (done.stdout, done.stderr) == ("imported\n", "")


def test_a_bare_folder_is_in_nobodys_way(host: Path) -> None:
    """A folder without `__init__.py` gives way to a package that comes later on `sys.path`."""
    for name in ("db", "workers"):
        (host / name / "data").mkdir(parents=True)
    done = run(host, "-c", USED)
    assert (done.stdout, done.stderr) == ("used\n", "")


def test_a_bare_folder_that_was_imported_is_refused(host: Path) -> None:
    """It took the name before our packages could be found."""
    (host / "db").mkdir()
    program = "import sys; path = sys.path; sys.path = [path[0]]; import db; sys.path = path; import federation"
    assert f"`db` is {host / 'db'}, in the place of" in run(host, "-c", program).stderr


def copied(tmp_path: Path) -> str:
    for name in ("db", "workers"):
        shutil.copytree(ROOT / name, tmp_path / "odd" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return f"import sys; sys.path.insert(0, {str(tmp_path / 'odd')!r})\n"


def linked(tmp_path: Path) -> str:
    (tmp_path / "odd").mkdir()
    for name in ("db", "workers"):
        (tmp_path / "odd" / name).symlink_to(ROOT / name)
    return f"import sys; sys.path.insert(0, {str(tmp_path / 'odd')!r})\n"


def zipped(tmp_path: Path) -> str:
    with zipfile.ZipFile(tmp_path / "odd", "w") as archive:
        for name in ("db", "workers"):
            for file in (ROOT / name).rglob("*"):
                if "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to(ROOT))
    return f"import sys; sys.path.insert(0, {str(tmp_path / 'odd')!r})\n"


def mapped(tmp_path: Path) -> str:
    """As some editable installs do it: by a finder, while the packages lie in folders of other names."""
    (tmp_path / "odd").mkdir()
    for name in ("db", "workers"):
        (tmp_path / "odd" / f"our-{name}").symlink_to(ROOT / name)
    return (
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        " def find_spec(self, name, path=None, target=None):\n"
        "  if name in ('db', 'workers'):\n"
        f"   return spec_from_file_location(name, {str(tmp_path / 'odd')!r} + f'/our-{{name}}/__init__.py')\n"
        "sys.meta_path.insert(0, Finder())\n"
    )


@pytest.mark.parametrize("place", [pytest.param(copied, marks=pytest.mark.full), linked, zipped, mapped])
def test_ours_may_lie_anywhere(host: Path, tmp_path: Path, place: Callable[[Path], str]) -> None:
    """What counts is what the packages are, not whether they lie beside federation."""
    program = f"{place(tmp_path)}{USED}\nimport db; print(db.__file__)"
    done = run(host, "-c", program)
    assert done.stderr == ""
    assert done.stdout.startswith(f"used\n{tmp_path / 'odd'}")


def test_nothing_heavy_is_imported_to_find_out(host: Path) -> None:
    """`import federation` is cheap: neither of the packages has been imported after it."""
    program = "import federation, sys; print({'db', 'workers', 'sqlalchemy'} & sys.modules.keys())"
    assert run(host, "-c", program).stdout == "set()\n"


def as_script(host: Path) -> list[str]:
    """As pip writes the `federation` command."""
    script = host.parent / "bin" / "federation"
    script.parent.mkdir()
    script.write_text("import sys\nfrom federation.cli import main\nsys.exit(main())\n")
    return [str(script), "doctor"]


@pytest.mark.parametrize(
    "arguments",
    [
        lambda _: ["-m", "federation.workers"],
        lambda _: ["-m", "federation", "doctor"],
        lambda _: ["-W", "default", "-m", "federation", "keys", "generate", "federation"],
        as_script,
    ],
)
def test_a_command_ends_with_one_line(host: Path, arguments: Callable[[Path], list[str]]) -> None:
    """Status 2, as with settings that need attention, and no traceback."""
    place = single_file(host, "workers")
    done = run(host, *arguments(host), path=[host, ROOT])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"federation: `workers` is {place}, in the place of")
    assert done.stderr.count("\n") == 1


def test_another_program_is_not_ended(host: Path) -> None:
    """A host that is looked up with `-m` itself, and is told `federation`, handles the error as it likes."""
    single_file(host, "db")
    (host / "shop").mkdir()
    (host / "shop" / "__init__.py").write_text("try:\n import federation\nexcept ImportError:\n print('without')\n")
    (host / "shop" / "__main__.py").write_text("print('open')\n")
    done = run(host, "-m", "shop", "federation")
    assert (done.stdout, done.stderr) == ("without\nopen\n", "")
