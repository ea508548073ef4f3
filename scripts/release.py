"""Makes the files of a release, and examines them. It uploads nothing, and makes no tag.

    scripts/release [--out FOLDER]

The commit that is checked out is built as the release that `workers/version.py` names: the source archive and the
wheel, each twice, in different folders and from an archive of the commit; both times they have the same bytes. The
wheel is installed on every Python from 3.11 on that is found here (PATH, pyenv), and starts what it
is for. `sbom.cdx.json` lists what an installation of it has, with every extra that a node uses, by CycloneDX.
Beside them are `SHA256SUMS`, and `tag.txt`: the text of the tag, which is what CHANGELOG.md says of this release.

Each step prints one line; the first that fails ends the script with 1 and the reason. Needs git, and a checkout without
changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Final

from environments import ROOT, Extras, Installer, make, pythons, try_out
from processes import Broken, command
from smoke import check_version, check_wheel

sys.path.insert(0, str(ROOT / "workers"))
from version import BASE, GIVEN

TRIED: Final[Extras] = frozenset({"node"})
LISTED: Final[Extras] = frozenset({"bullmq", "dashboard", "metrics", "node", "otel", "postgres", "redis"})
"""The extras of a node in production, whose packages the bill of materials has."""
LISTER: Final = "cyclonedx-bom>=7,<8"
BUILD_SECONDS: Final = 300


def main() -> None:
    """Take every step. At the first that goes wrong, end with 1 and the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist" / BASE, help="a folder that is made anew (default: dist/VERSION)"
    )
    out = parser.parse_args().out.absolute()
    began = time.monotonic()
    try:
        text = announcement((ROOT / "CHANGELOG.md").read_text(), BASE)
        with tempfile.TemporaryDirectory(prefix="federation-release-") as folder:
            release(Path(folder), out, text)
    except Broken as broken:
        sys.exit(f"release: {broken}")
    except KeyboardInterrupt:
        sys.exit(130)
    say(f"all of {BASE} is in {out}; it took {time.monotonic() - began:.0f} s")
    say(f"to release it: git tag --annotate v{BASE} --file {out / 'tag.txt'}, and upload the two files")


def release(folder: Path, out: Path, text: str) -> None:
    uv = Installer.found(folder / "tools")
    first, second = (build_commit(uv, folder / name) for name in ("once", "again"))
    same(first, second)
    say(f"built twice, with the same bytes: {', '.join(path.name for path in first)}")
    wheel = next(path for path in first if path.suffix == ".whl")
    check_wheel(wheel)
    for version, python in pythons().items():
        environment = make(uv, wheel, folder / "tried", TRIED, python=python)
        check_version(wheel, command(environment.federation("--version"), folder))
        say(f"on Python {version}: {', '.join(try_out(environment))}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in first:
        shutil.copyfile(path, out / path.name)
    list_packages(uv, wheel, folder, out / "sbom.cdx.json")
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in sorted(out.iterdir()))
    (out / "SHA256SUMS").write_text(sums)
    (out / "tag.txt").write_text(f"federation-delivery {BASE}\n\n{text}\n\n{sums}")


def announcement(changes: str, version: str) -> str:
    """Return what the changelog says of a release.

    Raises:
        Broken: it says nothing, or something is under "Unreleased" that nobody would be told of.
    """
    sections = dict(re.findall(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", changes, re.S | re.M))
    if sections.get("Unreleased", "").strip():
        raise Broken(f"CHANGELOG.md has lines under Unreleased: move them below `## {version} - DATE`")
    if not (found := sections.get(version, "").strip()):
        raise Broken(f"CHANGELOG.md has no section `## {version} - DATE`")
    return found


def build_commit(uv: Installer, folder: Path) -> list[Path]:
    """Build both files of the checked out commit, in a folder of their own, and return them by name.

    Times within the files are that of the commit: see https://reproducible-builds.org/specs/source-date-epoch/.
    """
    if command(["git", "-C", str(ROOT), "status", "--porcelain"], ROOT):
        raise Broken("the checkout has changes: commit them, as a release is that of a commit")
    folder.mkdir()
    archive = folder / "commit.tar"
    command(["git", "-C", str(ROOT), "archive", "--output", str(archive), "HEAD"], ROOT)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    os.environ |= {
        GIVEN: BASE,
        "SOURCE_DATE_EPOCH": command(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], ROOT).strip(),
    }
    uv.run("build", "--quiet", "--out-dir", str(folder / "built"), str(folder / "source"), within=BUILD_SECONDS)
    return sorted(path for path in (folder / "built").iterdir() if path.suffix in (".whl", ".gz"))


def same(first: list[Path], second: list[Path]) -> None:
    if [path.name for path in first] != [path.name for path in second] or len(first) != 2:
        raise Broken(f"two builds made {[path.name for path in first]} and {[path.name for path in second]}")
    for one, other in zip(first, second, strict=True):
        if digest(one) != digest(other):
            raise Broken(f"two builds of one commit differ in {one.name}")


def list_packages(uv: Installer, wheel: Path, folder: Path, to: Path) -> None:
    """Write what an installation of the wheel has, in the words of CycloneDX, with nothing of this machine in it."""
    environment = make(uv, wheel, folder / "listed", LISTED)
    lister = folder / "lister"
    uv.run("venv", "--quiet", "--no-project", "--python", sys.executable, str(lister))
    uv.run("pip", "install", "--quiet", "--python", str(lister / "bin" / "python"), LISTER)
    words = ("environment", str(environment.bin / "python"), "--output-reproducible", "--output-format", "JSON")
    told = json.loads(command([str(lister / "bin" / "cyclonedx-py"), *words], folder))
    for component in told["components"]:
        component.pop("externalReferences", None)  # where this one was installed from: a folder of this run
    names = {component["name"] for component in told["components"]}
    if not {"federation-delivery", "httpx", "bullmq"} <= names:
        raise Broken(f"the bill of materials lacks packages: {sorted(names)}")
    to.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
    say(f"its bill of materials has {len(names)} packages")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def say(what: str) -> None:
    print(f"release: {what}", flush=True)


if __name__ == "__main__":
    main()
