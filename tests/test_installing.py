"""Who does what the READMEs say has it installed: there is no release, so nothing is had by its name."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
INSTALL = re.compile(r"pip3? install (.*)")
BY_NAME = re.compile(r"""(?:^|[\s'"])federation[-_]delivery\b""")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPLOYED = frozenset({"bullmq", "dashboard", "metrics", "node", "postgres"})


@pytest.fixture(scope="module")
def environments() -> Iterator[ModuleType]:
    """What `scripts/smoke` reads the pages by: what is tested here is installed there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("environments")


def test_nothing_of_ours_is_installed_by_name(environments: ModuleType) -> None:
    """An index knows no such name, or somebody else's."""
    lines = [(path, found[1]) for path in environments.installing() for found in INSTALL.finditer(path.read_text())]
    assert len(lines) >= 4
    assert [(path, line) for path, line in lines if BY_NAME.search(line)] == []


def test_the_readmes_install_from_here(environments: ModuleType) -> None:
    """From the checkout or from a wheel, with extras that there are; those that are named, and no more, are tried."""
    assert environments.documented() == {
        frozenset({"node"}): "docs/embed/install.md",
        frozenset({"dashboard", "node"}): "docs/dashboard.md",
        DEPLOYED: "docs/deploy/README.md",
        frozenset({"analytics"}): "federation/analytics/README.md",
        frozenset(): "workers/README.md",
    }
    assert frozenset().union(*environments.documented()) <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("line", "extras"),
    [
        ("pip install .", [set()]),
        ("`pip install .` does it", [set()]),
        ("pip install '.[node]'    # add more", [{"node"}]),
        ('sudo /opt/bin/pip install --constraint c.txt "$(echo dist/*.whl)[node,bullmq]"', [{"node", "bullmq"}]),
        (" && pip install --no-cache-dir --constraint c.txt '.[metrics]'", [{"metrics"}]),
        ("pip install -e '.[bench]'", []),
        ("pip install pandas", []),
        ("pip install --target libraries sqlalchemy", []),
    ],
)
def test_what_installs_this_is_told_from_what_does_not(
    environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, extras: list[set[str]]
) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"{line}\n")
    assert [*environments.documented([tmp_path / "page.md"])] == extras


def test_nothing_but_the_analytics_may_load_spark() -> None:
    """The contract on the whole way of imports names every floor of the application."""
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (floors,) = [contract["layers"] for contract in contracts if contract.get("containers") == ["federation"]]
    (without,) = [each for each in contracts if "pyspark" in each.get("forbidden_modules", ())]
    names = {f"federation.{name}" for floor in floors for name in re.findall(r"\w+", floor)}
    assert {*without["source_modules"]} == {"db", "workers", *names} - {"federation.analytics"}
