"""One measurement of our own storages, in a process of its own, so that it may be of another tree's code.

python scripts/bench/ours_process.py <module of bench> <function> <its arguments, as JSON>
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import unwind_when_terminated
from bench.trees import Tree, measured_tree


async def measured(tree: Tree, function: Any, *arguments: object) -> dict[str, float]:
    """Return what the function of a module of `bench` measures, with the code of that tree.

    Exits if that code cannot be measured.
    """
    command = [sys.executable, __file__, function.__module__, function.__name__, json.dumps(arguments)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **tree.variables()}
    )
    try:
        said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()  # it removes what it wrote
            await process.wait()
    if process.returncode:
        tree.give_up(complained.decode())
    found: dict[str, float] = json.loads(said)
    return found


if __name__ == "__main__":
    sys.path.insert(0, measured_tree())
    unwind_when_terminated()
    module, name, given = sys.argv[1:]
    print(json.dumps(asyncio.run(getattr(importlib.import_module(module), name)(*json.loads(given)))))
