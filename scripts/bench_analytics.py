"""How long the analytics take, how that grows, and how much memory they need, compared with pandas and DuckDB.

    python scripts/bench_analytics.py [--attempts 1000000 3000000 10000000] [--servers 10000] [--repeat 1]
    python scripts/bench_analytics.py --keep DIR --engines spark one-worker two-workers --attempts 10000000 100000000
    python scripts/bench_analytics.py --engines spark store --store 's3://bucket/bench?endpoint_override=http://…'

scripts/generate_attempts.py makes 30 days of attempts, half of them to one server. Every measurement is a process of
its own, from its start to its last result on disk: `spark` computes all outputs, with 2 cores and a heap of 512 MiB for
driver and executor, which are one process here, and need as much again beside the heap; `pandas` and `duckdb` compute
the daily rows alone (DuckDB with the same percentiles, pandas with interpolated ones), each with at most 1 GiB of
writable memory (RLIMIT_DATA; DuckDB knows its limit, and may spill). `one-worker` and `two-workers` compute what
`spark` does, on a standalone cluster of this machine: a master, and workers with one core and an executor of 512 MiB
each; their `cpu` is that of all processes, and `driver_mib` that of the driver alone. `store` computes what `spark`
does from exports in a folder of `--store`, where its results go, too: the exports are copied there before, at no cost
to what is measured. Python workers count with the driver, the store's own server does not. The first run of Spark on a
machine also writes the archive of its classes when it ends; its time is not that of the others.

With `--keep` every row is written to DIR/rows.jsonl as soon as it is measured, and exports stay: the same command goes
on where it was stopped, and measures nothing again that is there. What takes longer than `--minutes` is ended, and the
row says so. 100 000 000 attempts are some 5 GB of exports; have four times as much room.

`cpu` is processor time of all threads, which a busy machine distorts less than `seconds`; `growth` is that of `cpu`
against the smallest input, divided by that of the input. Prints rows on stderr and one JSON object on stdout. Needs the
`analytics` extra, pandas and duckdb.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MEMORY_BYTES = 1 << 30
HEAP = "512m"
DAYS, UNTIL = 30, date(2026, 10, 31)
NOW = datetime(2026, 10, 31, 3, tzinfo=UTC)
ENGINES = ("spark", "pandas", "duckdb")
WORKERS = {"one-worker": 1, "two-workers": 2}
STORE = "store"
OURS = ("spark", STORE, *WORKERS)
STARTED_SECONDS = 180
FEWEST_PARTS, BYTES_PER_PART = 2, 16 << 20
DAILY_COLUMNS = ["server_url", "started_at", "duration_ms", "outcome", "error_code", "relayed_by", "request_bytes"]


def main() -> None:
    """Run the benchmark, or one of its child roles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", nargs="+", type=int, default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--servers", type=int, default=10_000)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=(*ENGINES, STORE, *WORKERS))
    parser.add_argument("--store", help="the folder of `store`; its credentials are in the environment")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each kind; medians are shown")
    parser.add_argument("--keep", type=Path, help="write exports and rows here, and go on with what is there")
    parser.add_argument("--minutes", type=float, default=120, help="how long each measurement may take")
    parser.add_argument("--role", choices=(*ENGINES, STORE, *WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--exports", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if STORE in options.engines and not options.store:
        parser.error(f"{STORE} needs --store")
    if options.role is None:
        benchmark(options)
    else:
        roles = {"spark": run_spark, "pandas": run_pandas, "duckdb": run_duckdb}
        roles |= {name: partial(run_cluster, count) for name, count in WORKERS.items()}
        roles[STORE] = partial(run_store, options.store)
        print(json.dumps(roles[options.role](options.exports, options.results)))


def benchmark(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children end with this process
    rows = []
    with tempfile.TemporaryDirectory(prefix="fd-bench-", dir=options.keep) as scratch:
        known = Known((options.keep or Path(scratch)) / "rows.jsonl")
        for attempts in options.attempts:
            exports = (options.keep or Path(scratch)) / f"{attempts}"
            if not (exports / "attempts").exists():  # the last to be there
                shutil.rmtree(exports, ignore_errors=True)
                make_exports(exports, attempts=attempts, servers=options.servers)
            for engine in options.engines:
                runs = []
                for run in range(options.repeat):
                    key = {"engine": engine, "attempts": attempts, "servers": options.servers, "run": run}
                    results = Path(scratch) / f"{engine}-{attempts}-{run}"
                    measure = partial(child, engine, exports, results, options.minutes * 60, options.store)
                    runs.append(known.measured(key, measure))
                    shutil.rmtree(results, ignore_errors=True)
                rows.append({"engine": engine, "attempts": attempts, **median(runs)})
                show(rows[-1])
    add_growth(rows)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    print(json.dumps({"servers": options.servers, **machine, "rows": rows}))


class Known:
    """What was measured, one line of JSON each, in a file that outlives this process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        whole = (line for line in file.read_text().splitlines() if line.endswith("}}")) if file.exists() else ()
        self._found = {json.dumps(told["key"]): told["found"] for told in map(json.loads, whole)}

    def measured(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what was found for this key; measure it only if nothing was."""
        name = json.dumps(key)
        if name not in self._found:
            self._found[name] = measure()
            with self._file.open("a") as output:  # a line that was cut short is not one of those before
                output.write("\n" + json.dumps({"key": key, "found": self._found[name]}))
        return self._found[name]


def make_exports(exports: Path, *, attempts: int, servers: int) -> None:
    sizes = {"attempts": attempts, "servers": servers, "days": DAYS, "until": UNTIL, "hot-share": 0.5, "out": exports}
    command = [sys.executable, str(ROOT / "scripts" / "generate_attempts.py")]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in sizes.items())], check=True, stdout=sys.stderr)


def child(engine: str, exports: Path, results: Path, most_seconds: float, store: str | None) -> dict[str, Any]:
    """Return what a fresh process measured, or why it did not come to an end."""
    command = [sys.executable, __file__, "--role", engine, "--exports", str(exports), "--results", str(results)]
    command += ["--store", store] if store else []
    started = time.monotonic()
    # Days are UTC days: Spark's session says so, the others use the process's time zone.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TZ": "UTC"},
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=most_seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {most_seconds / 60:g} minutes"}
    finally:
        with contextlib.suppress(ProcessLookupError):  # with the JVMs that it started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - started
    if process.returncode:
        if engine in OURS:
            raise SystemExit(f"{engine} failed:\n{err[-4000:]}")
        errors = [line for line in err.splitlines() if "Error" in line or "Exception" in line]
        return {"failed": errors[-1][:120] if errors else f"exit {process.returncode}"}
    return {"seconds": seconds, **json.loads(out)}


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = next((run for run in runs if "failed" in run), None)
    return failed or {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def add_growth(rows: list[dict[str, Any]]) -> None:
    """Add to each row how its time grew, against its engine's smallest input, each time the input grew."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "cpu" in row:
            base = first.setdefault(row["engine"], row)
            row["growth"] = (row["cpu"] / base["cpu"]) / (row["attempts"] / base["attempts"])


def show(row: dict[str, Any]) -> None:
    cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    print(*(f"{cell:>14}" for cell in cells), *(["  " + " ".join(row)]), file=sys.stderr, flush=True)


def run_spark(exports: Path, results: Path) -> dict[str, float]:
    """Compute all outputs, each written as Parquet."""
    from federation.analytics.pipeline import work_of
    from federation.analytics.session import session

    work = work_of(exports, None, UNTIL)
    with session("local[2]", name="bench", settings={"spark.driver.memory": HEAP}, work=work) as spark:
        return measure_spark(spark, exports, results)


def run_store(store: str, exports: Path, results: Path) -> dict[str, float]:
    """Compute all outputs from exports in a store, and write them there."""
    from federation.analytics.data.snapshots import open_for_writing, open_place
    from federation.analytics.data.store_urls import parse_store_url
    from federation.analytics.pipeline import work_of
    from federation.analytics.session import session

    folder = parse_store_url(store) / f"{results.name}-{time.time_ns()}"
    begun = own_cpu()
    copy_exports(exports, open_place(folder / "exports"))
    copied = own_cpu() - begun
    stored = open_place(folder / "exports")
    work = work_of(stored, None, UNTIL)
    with session("local[2]", name="bench", settings={"spark.driver.memory": HEAP}, work=work) as spark:
        found = measure_spark(spark, stored, open_for_writing(folder / "results"))
    return {**found, "cpu": found["cpu"] - copied}


def copy_exports(exports: Path, stored: Any) -> None:
    """Copy exports from a directory to a store."""
    from federation.analytics.data.export import ATTEMPTS, STORED_UNDATED
    from federation.analytics.data.results import UNDATED

    for directory in sorted({file.parent for file in exports.rglob("*.parquet")}):
        name = str(directory.relative_to(exports)).replace(f"{ATTEMPTS}/{UNDATED}", f"{ATTEMPTS}/{STORED_UNDATED}")
        stored.place({name: [stored.send(file, name) for file in sorted(directory.glob("*.parquet"))]})
    stored.commit()


def run_cluster(workers: int, exports: Path, results: Path) -> dict[str, float]:
    """Compute all outputs on a standalone cluster of this machine."""
    from federation.analytics.pipeline import work_of
    from federation.analytics.session import session

    work = work_of(exports, None, UNTIL)
    settings = {"spark.driver.memory": HEAP, "spark.executor.memory": HEAP, "spark.executor.cores": "1"}
    parts = {"spark.sql.shuffle.partitions": str(max(FEWEST_PARTS, work // BYTES_PER_PART))}  # as `spark` divides it
    with tempfile.TemporaryDirectory(prefix="fd-cluster-", dir=results.parent) as directory:
        with cluster(Path(directory), workers) as master:
            with session(master, name="bench", settings={**settings, **parts}, work=work) as spark:
                found = measure_spark(spark, exports, results)
                driver = spark.sparkContext._gateway.proc
            driver.stdin.close()  # its JVM ends
            driver.wait()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**found, "cpu": own_cpu() + usage.ru_utime + usage.ru_stime}


@contextlib.contextmanager
def cluster(directory: Path, workers: int) -> Iterator[str]:
    """Start a master and workers, and yield the master's URL."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(start_daemon("master.Master", directory / "master", "--port", "0"))
        master = told(directory / "master", r"Starting Spark master at (spark://[\d.:]+)")
        for number in range(workers):
            size = ("--cores", "1", "--memory", "1g", "--work-dir", str(directory / f"work-{number}"))
            running.append(start_daemon("worker.Worker", directory / f"worker-{number}", *size, master))
            told(directory / f"worker-{number}", "(Successfully registered) with master")
        yield master
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait()


def start_daemon(name: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    import pyspark

    home = Path(pyspark.__file__).parent
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--webui-port", "0", *arguments], env=environment, stdout=output, stderr=output
        )


def told(log: Path, pattern: str) -> str:
    """Wait until the log says it, and return its group."""
    until = time.monotonic() + STARTED_SECONDS
    while time.monotonic() < until:
        if found := re.search(pattern, log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"{log.name} did not start:\n{log.read_text()[-2000:]}")


def measure_spark(spark: Any, exports: Any, results: Any) -> dict[str, float]:
    from federation.analytics.data.inputs import attempts_size, read_exports
    from federation.analytics.data.snapshots import commit
    from federation.analytics.frames import Window
    from federation.analytics.pipeline import write_results

    window = Window(since=UNTIL - timedelta(days=DAYS), until=UNTIL)
    inputs = read_exports(spark, exports, window)
    begun: list[tuple[str, float]] = []

    def told(text: str) -> None:
        begun.append((text.removeprefix("computing ").replace(" ", "_"), time.monotonic()))

    write_results(inputs, results, window, size=attempts_size(exports, window.days), now=NOW, told=told)
    commit(results)
    told("done")
    phases = {name: after - at for (name, at), (_, after) in itertools.pairwise(begun)}
    jvm = spark.sparkContext._gateway.proc.pid
    return {
        "cpu": session_cpu(),
        "driver_mib": peak_mib(jvm),
        "heap_mib": live_heap_mib(spark),
        "python_mib": peak_mib(os.getpid()),
        **{f"{name}_s": seconds for name, seconds in phases.items()},
    }


def run_pandas(exports: Path, results: Path) -> dict[str, float]:
    """Compute the daily rows, the way one would write it."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    import pandas

    rows = pandas.read_parquet(exports / "attempts", columns=DAILY_COLUMNS)
    rows["day"] = rows["started_at"].dt.floor("D")
    key = ["server_url", "day"]
    daily = rows.groupby([*key, "outcome"]).size().unstack(fill_value=0)
    daily["request_bytes"] = rows.groupby(key)["request_bytes"].sum()
    daily["relayed"] = rows.groupby(key)["relayed_by"].count()
    delivered = rows[rows["outcome"] == "delivered"]
    percentiles = delivered.groupby(key)["duration_ms"].quantile([0.5, 0.95, 0.99]).unstack()
    percentiles.columns = ["p50_ms", "p95_ms", "p99_ms"]
    errors = rows.groupby([*key, "error_code"]).size().unstack(fill_value=0)
    results.mkdir(parents=True)
    daily.join(percentiles).join(errors).to_parquet(results / "daily.parquet")
    return {"cpu": own_cpu(), "python_mib": peak_mib(os.getpid())}


def run_duckdb(exports: Path, results: Path) -> dict[str, float]:
    """Compute the daily rows, the way one would write it."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    import duckdb

    results.mkdir(parents=True)
    limits = {"threads": "2", "memory_limit": "900MB", "temp_directory": str(results / "spilled")}
    with duckdb.connect(config=limits) as connection:
        connection.execute(f"""
            COPY (
                SELECT server_url, CAST(started_at AS DATE) AS day,
                    count(*) FILTER (outcome <> 'parked') AS attempts,
                    count(*) FILTER (outcome = 'delivered') AS delivered,
                    count(*) FILTER (outcome = 'retryable') AS retryable,
                    count(*) FILTER (outcome = 'permanent') AS permanent,
                    count(relayed_by) AS relayed, sum(request_bytes) AS request_bytes,
                    histogram(error_code) AS errors,
                    quantile_disc(duration_ms, [0.5, 0.95, 0.99]) FILTER (outcome = 'delivered') AS ms
                FROM read_parquet('{exports}/attempts/*/*.parquet')
                GROUP BY ALL
            ) TO '{results}/daily.parquet'
        """)  # noqa: S608 - the paths are our own
    return {"cpu": own_cpu(), "python_mib": peak_mib(os.getpid())}


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def session_cpu() -> float:
    """Return the processor time of this process, its JVM and Spark's Python workers, which all are of one session."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == os.getsid(0):
                ticks += sum(map(int, fields[11:15]))  # with those of its children that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Return the most memory that the process ever had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def live_heap_mib(spark: Any) -> float:
    """Return how much of the heap is in use after a collection, at the end."""
    spark._jvm.java.lang.System.gc()
    runtime = spark._jvm.java.lang.Runtime.getRuntime()
    return float((runtime.totalMemory() - runtime.freeMemory()) / (1 << 20))


if __name__ == "__main__":
    main()
