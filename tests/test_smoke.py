"""The smoke run notices a wheel that is not what this checkout is; what it runs is shown by running it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
LUA = "workers/storage/redis/lua/claim.lua"


@pytest.fixture(scope="module")
def smoke() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("smoke")


@pytest.fixture
def contents(smoke: ModuleType) -> dict[str, bytes]:
    """What a wheel of this checkout holds, by name."""
    paths = [path for package in smoke.PACKAGES for path in smoke.files(ROOT / package)]
    assert len(paths) > 300
    return {
        **{path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths},
        "federation_delivery-1.dist-info/METADATA": b"Name: federation-delivery\n",
    }


def packed(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    with ZipFile(tmp_path / "any.whl", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return tmp_path / "any.whl"


def test_a_whole_wheel_is_taken(smoke: ModuleType, tmp_path: Path, contents: dict[str, bytes]) -> None:
    """Every file of the packages, and what installers need to know, is a whole wheel."""
    assert LUA in contents
    smoke.check_wheel(packed(tmp_path, contents))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda contents: contents.pop(LUA), f"the wheel lacks {LUA}"),
        (lambda contents: contents.pop("db/py.typed"), "the wheel lacks db/py.typed"),
        (lambda contents: contents.update({LUA: b"return 1"}), f"the wheel has another version of {LUA}"),
        (lambda contents: contents.update({"tests/peer.py": b""}), "the wheel also has tests/peer.py"),
    ],
    ids=["no script", "no marker of types", "an old script", "the tests"],
)
def test_another_wheel_is_not(
    smoke: ModuleType,
    tmp_path: Path,
    contents: dict[str, bytes],
    change: Callable[[dict[str, bytes]], object],
    reason: str,
) -> None:
    """What is missing, differs or is too much is named."""
    change(contents)
    with pytest.raises(smoke.Broken, match=f"^{reason}$"):
        smoke.check_wheel(packed(tmp_path, contents))
