"""The public names: few, each with a line in the README; those that have moved still work, and say where they are."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import workers
from tests.workers.manual import README


def test_the_readme_lists_the_public_names_and_no_other() -> None:
    """Up to forty, which a newcomer reads once."""
    section = README.read_text().partition("\n## Names\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert sorted(listed) == sorted(workers.__all__)
    assert len(listed) == len(set(listed)) <= 40


@pytest.mark.parametrize("module", workers._MOVED)
def test_a_name_that_has_moved_says_where_it_is(module: str) -> None:
    """With a warning; it is the same object."""
    for name in workers._MOVED[module]:
        with pytest.warns(DeprecationWarning, match=rf"import {name} from {re.escape(module)}; from workers it goes"):
            found = getattr(workers, name)
        assert found is getattr(importlib.import_module(module), name)
        assert name not in workers.__all__


def test_a_module_is_there_without_an_import_of_its_own() -> None:
    """As it was while `import workers` imported all of them."""
    program = "import workers; print(workers.errors.StorageError.__name__, workers.worker.Worker is workers.Worker)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "StorageError True\n", done.stderr


def test_a_name_that_never_was_is_none() -> None:
    with pytest.raises(AttributeError, match="module 'workers' has no attribute 'Que'"):
        workers.Que  # type: ignore[attr-defined]  # noqa: B018 - what is refused
