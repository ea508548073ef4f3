"""Python processes that begin with our imports done, as forks of one that has done them.

`python -m federation` spends a second and more of CPU on imports, and a run of the tests starts some hundreds of them.
A command that begins with `PYTHON` instead of `sys.executable` is forked by a process that has imported everything,
with its own arguments, environment, directory and standard streams; to whoever started it, it is a child as any other.
What a test learns of imports, of options of the interpreter or of its first and last moments, it learns from
`sys.executable` only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

ROOT: Final = Path(__file__).parents[1]
LIKE_ANY: Final = {"PYTHONPATH", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE"}
"""Of the variables that the interpreter reads at its start, those that `_become` sees to."""
LIBRARIES: Final = (
    *("aiosqlite", "alembic.command", "apscheduler.triggers.interval"),
    *("uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on"),
)
"""What our modules import when they first need it, or theirs."""
LEFT_OUT: Final = (
    "federation.analytics",
    "federation.__main__",
    "federation.testing",
    "federation.workers",
    "db.migrations",
    "workers.testing",
    "workers.__main__",
    "workers.pytest_plugin",
)
ACTIONS: Final[tuple[Literal["default", "error"], ...]] = ("default", "error")
"""What may be done with every warning."""
LARGEST: Final = 1 << 20
PR_SET_CHILD_SUBREAPER: Final = 36
_AT_FIRST: Final = dict(os.environ)


class _Warm(str):
    """The path of the interpreter, told apart from others by its type."""


PYTHON: Final = _Warm(sys.executable)


@dataclass(frozen=True, slots=True)
class Order:
    """One process: `arguments` are those of the interpreter, `-m MODULE ...`, `-c PROGRAM ...` or `SCRIPT ...`."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    ignores_ctrl_c: bool
    """As whoever starts it does at that moment."""


# The side of the tests


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that has what begins with `PYTHON` forked; everything else of it is as it was."""

    def _execute_child(self, *arguments: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]  # there is no public place to say how a child is made
        given = inspect.signature(start).bind(*arguments).arguments
        order = _order(given)
        if order is None:
            start(*arguments)
            return
        inner = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        self.pid = _nursery.fork(order, [own if fd == -1 else fd for own, fd in enumerate(inner)])
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]  # as the original does at this point
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _order(given: Mapping[str, Any]) -> Order | None:
    """What is to be forked; None if a true start is wanted, and where a grandchild cannot be waited for.

    Raises:
        ValueError: something is asked that a fork would not do.
    """
    command = given["args"]
    if sys.platform != "linux" or not isinstance(command, list | tuple) or not isinstance(command[0], _Warm):
        return None
    environment = {name: str(value) for name, value in (given["env"] or os.environ).items()}
    told = {name for name, value in environment.items() if value != _AT_FIRST.get(name)}
    special = {name for name in told if name.startswith("PYTHON")} - LIKE_ANY
    refused = {
        "options of the interpreter": command[1].startswith("-") and command[1] not in ("-m", "-c"),
        "preexec_fn": given["preexec_fn"] is not None,
        "pass_fds": bool(given["pass_fds"]),
        "start_new_session": given["start_new_session"],
        ", ".join(sorted(special)): bool(special),
        "PYTHONWARNINGS": environment.get("PYTHONWARNINGS", "") not in ("", *ACTIONS),
    }
    if wanted := [name for name, is_wanted in refused.items() if is_wanted]:
        raise ValueError(f"start sys.executable instead of warm.PYTHON: a fork knows no {'; '.join(wanted)}")
    directory = os.path.abspath(given["cwd"] or os.getcwd())
    ignores_ctrl_c = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return Order([os.fspath(each) for each in command[1:]], environment, directory, ignores_ctrl_c)


class _Nursery:
    """This process's forking process, started when first needed; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours: socket.socket | None = None

    def fork(self, order: Order, streams: list[int]) -> int:
        """The process id of the new child."""
        with self._lock, _taking_in_orphans():
            if self._ours is None:
                self._ours = self._start()
            message = json.dumps(asdict(order)).encode()
            assert len(message) < LARGEST
            socket.send_fds(self._ours, [message], streams)
            answer = self._ours.recv(100)
            if not answer:
                raise RuntimeError("the process that forks has ended; its stderr is this one's")
            return int(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(process.wait)
        atexit.register(ours.close)
        return ours


_nursery = _Nursery()


@contextlib.contextmanager
def _taking_in_orphans() -> Iterator[None]:
    """Whoever loses its parent meanwhile becomes a child of this process: so it can wait for a grandchild."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def install() -> None:
    """From now on `subprocess` and asyncio know `PYTHON`."""
    subprocess.Popen = Popen  # type: ignore[misc]  # for asyncio, too, which makes its processes by this name


# The side of the process that forks


def _import_everything() -> None:
    for package in ("db", "workers", "federation"):
        module = import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            if not found.name.startswith(LEFT_OUT):
                import_module(found.name)
    for library in LIBRARIES:
        import_module(library)
    import_module("federation.cli.app")._command()  # is made of all its options, which takes as long as three forks
    import_module("sqlalchemy.orm").configure_mappers()  # as a statement does that is the first to name a table


def _serve(theirs: socket.socket) -> Order:
    """Fork a child for each order until nobody orders any more; returns in the children only, with their order."""
    while True:
        message, streams, _, _ = socket.recv_fds(theirs, LARGEST, 3)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        proceed, go = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            os.close(go)
            os.read(proceed, 1)  # until it is the tests' own child
            for own, fd in enumerate(streams):
                os.dup2(fd, own)
            os.closerange(3, 1 + max(tell, go, proceed, *streams))
            return Order(**json.loads(message))
        os.waitpid(between, 0)
        theirs.send(os.read(told, 100))
        for fd in (told, tell, proceed, go, *streams):
            os.close(fd)


def _become(order: Order, path: list[str]) -> None:
    """What the interpreter does at its start: streams, signals, warnings, the search path and `sitecustomize`."""
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    time.tzset()
    signal.signal(signal.SIGINT, signal.SIG_IGN if order.ignores_ctrl_c else signal.default_int_handler)
    for action in ACTIONS:
        if order.environment.get("PYTHONWARNINGS") == action:
            warnings.simplefilter(action)
    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w")
    sys.stderr = _stream(2, "w", errors="backslashreplace")
    given = filter(None, order.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [os.path.abspath(each) for each in given] + path
    with contextlib.suppress(ModuleNotFoundError):
        import_module("sitecustomize")


def _stream(fd: int, mode: str, errors: str = "strict") -> io.TextIOWrapper:
    at_once = mode == "w" and bool(os.environ.get("PYTHONUNBUFFERED"))
    raw = open(fd, f"{mode}b", buffering=0 if at_once else -1, closefd=False)  # noqa: SIM115  # for as long as it runs
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=fd == 2 or os.isatty(fd), write_through=at_once)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        program, sys.argv[:] = arguments[1], ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def _end(status: int) -> None:
    """Do what the interpreter does at its end, but for taking apart what was imported: that takes ten times a fork.

    Objects that only a module of ours still has are not finalized, so who wants to be warned of them ends as usual.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as nothing public does
    atexit._run_exitfuncs()
    program = vars(sys.modules["__main__"])
    while program is not globals() and program:  # `runpy` has seen to its own
        program.popitem()  # what was made last goes first, so that a file is written before what it needs is closed
    gc.collect()
    with contextlib.suppress(OSError, ValueError):  # then the interpreter itself tells, and has a status for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    # Ctrl-C reaches the whole group; the end of the tests ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = {os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    path = [each for each in sys.path[1:] if each not in own]
    sys.modules.pop("sitecustomize", None)
    gc.disable()  # imports leave next to nothing to collect, and to look for it is an eighth of their time
    _import_everything()
    gc.freeze()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    _become(order, path)
    try:
        _run(order.arguments)
    except SystemExit as done:
        if not isinstance(done.code, int | None):
            raise
        status = done.code or 0
    else:
        status = 0
    if not order.environment.get("PYTHONWARNINGS"):
        _end(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
