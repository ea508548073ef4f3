"""The profile of a benchmark: what each part of a process costs, and stacks that other tools read."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

SCRIPTS: Final = Path(__file__).parent.parent / "scripts"
SECONDS: Final = 0.2


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench.sampling")


def busy() -> None:
    """This thread has used some CPU time."""
    began = time.thread_time()
    while time.thread_time() < began + SECONDS:
        pass


async def test_what_each_thread_uses_is_counted_for_what_it_does(sampling: ModuleType) -> None:
    """The main thread's, and another's while the event loop has nothing to do."""
    samples = sampling.Samples()

    def elsewhere() -> None:
        busy()

    cpu = time.process_time()
    with samples.taken():
        await asyncio.to_thread(elsewhere)
        busy()
    cpu = time.process_time() - cpu
    folded = samples.folded()
    assert sum(folded.values()) / 1e6 == pytest.approx(cpu, abs=SECONDS / 4)
    there = sum(spent for stack, spent in folded.items() if "elsewhere" in stack) / 1e6
    here = sum(spent for stack, spent in folded.items() if "busy" in stack and "elsewhere" not in stack) / 1e6
    assert there == pytest.approx(SECONDS, abs=SECONDS / 4)
    assert here == pytest.approx(SECONDS, abs=SECONDS / 4)


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        ("workers/worker/loop.py:run;federation/http/connection.py:_send;asyncio/selector_events.py:write", "HTTP"),
        ("federation/http/connection.py:_send;asyncio/sslproto.py:write", "TLS"),
        (
            "federation/sealed/outbound/wire.py:_a;federation/protocol/sealing.py:_seal;nacl/a.py:b",
            "cryptography",
        ),
        ("workers/queue.py:a;workers/storage/on_redis/shared_connection.py:call;redis/a.py:b", "Redis"),
        ("federation/delivery/ledger/statements.py:write;sqlalchemy/engine/base.py:execute;psycopg/a.py:b", "database"),
        ("asyncio/streams.py:a;workers/storage/bullmq/claims.py:end;json/decoder.py:decode", "queue core"),
        ("federation/delivery/attempt/processor.py:_parse;pydantic/main.py:model_validate", "our code"),
        ("bench/delivering.py:emptied;sqlalchemy/engine/base.py:execute", "benchmark"),
        ("asyncio/base_events.py:_run_once;selectors.py:select", "event loop"),
        ("threading.py:run", "other"),
    ],
)
def test_a_stack_belongs_to_the_innermost_part(sampling: ModuleType, stack: str, part: str) -> None:
    """Standard library and converters belong to whoever calls them."""
    parts = sampling.by_part({stack: 5, f"{stack};json/encoder.py:encode": 2})
    assert {name: spent for name, spent in parts.items() if spent} == {part: 7}


def test_stacks_are_written_as_tools_read_them(sampling: ModuleType, tmp_path: Path) -> None:
    """One line each, with its microseconds after the last space."""
    file = tmp_path / "a" / "b.folded"
    sampling.write_folded({"a.py:f;b.py:g": 3, "a.py:f": 12}, file)
    assert file.read_text() == "a.py:f 12\na.py:f;b.py:g 3\n"
    code = compile("lambda: 0", str(Path(sys.path[0]) / "a file;.py"), "eval")
    assert " " not in sampling._frame_name(code)
    assert ";" not in sampling._frame_name(code)
