"""How long the analytics take, how that grows, and how much memory they need, compared with pandas and DuckDB.

    python scripts/bench_analytics.py [--attempts 1000000 3000000 10000000] [--servers 10000] [--repeat 1]

scripts/generate_attempts.py makes 30 days of attempts, half of them to one server. Every measurement is a process of
its own, from its start to its last result on disk: `spark` computes all outputs, with 2 cores and a heap of 512 MiB for
driver and executor, which are one process here, and need as much again beside the heap; `pandas` and `duckdb` compute
the daily rows alone (DuckDB with the same percentiles, pandas with interpolated ones), each with at most 1 GiB of
writable memory (RLIMIT_DATA; DuckDB knows its limit, and may spill). The first run of Spark on a machine also writes
the archive of its classes when it ends; its time is not that of the others.
`cpu` is processor time of all threads, which a busy machine distorts less than `seconds`; `growth` is that of `cpu`
against the smallest input, divided by that of the input. Prints rows on stderr and one JSON object on stdout. Needs the
`analytics` extra, pandas and duckdb.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MEMORY_BYTES = 1 << 30
HEAP = "512m"
DAYS, UNTIL = 30, date(2026, 10, 31)
NOW = datetime(2026, 10, 31, 3, tzinfo=UTC)
ENGINES = ("spark", "pandas", "duckdb")
DAILY_COLUMNS = ["server_url", "started_at", "duration_ms", "outcome", "error_code", "relayed_by", "request_bytes"]


def main() -> None:
    """Run the benchmark, or one of its child roles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", nargs="+", type=int, default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--servers", type=int, default=10_000)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each kind; medians are shown")
    parser.add_argument("--keep", type=Path, help="write the exports here and keep them; what is there is used again")
    parser.add_argument("--role", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--exports", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is None:
        benchmark(options)
    else:
        roles = {"spark": run_spark, "pandas": run_pandas, "duckdb": run_duckdb}
        print(json.dumps(roles[options.role](options.exports, options.results)))


def benchmark(options: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory(prefix="fd-bench-") as scratch:
        for attempts in options.attempts:
            exports = (options.keep or Path(scratch)) / f"{attempts}"
            if not (exports / "attempts").exists():
                make_exports(exports, attempts=attempts, servers=options.servers)
            for engine in options.engines:
                results = [Path(scratch) / f"{engine}-{attempts}-{run}" for run in range(options.repeat)]
                runs = [child(engine, exports, each) for each in results]
                rows.append({"engine": engine, "attempts": attempts, **median(runs)})
                show(rows[-1])
    add_growth(rows)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    print(json.dumps({"servers": options.servers, **machine, "rows": rows}))


def make_exports(exports: Path, *, attempts: int, servers: int) -> None:
    sizes = {"attempts": attempts, "servers": servers, "days": DAYS, "until": UNTIL, "hot-share": 0.5, "out": exports}
    command = [sys.executable, str(ROOT / "scripts" / "generate_attempts.py")]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in sizes.items())], check=True, stdout=sys.stderr)


def child(engine: str, exports: Path, results: Path) -> dict[str, Any]:
    """Return what a fresh process measured, or why it did not come to an end."""
    command = [sys.executable, __file__, "--role", engine, "--exports", str(exports), "--results", str(results)]
    started = time.monotonic()
    # Days are UTC days: Spark's session says so, the others use the process's time zone.
    finished = subprocess.run(command, capture_output=True, env={**os.environ, "TZ": "UTC"}, text=True)
    seconds = time.monotonic() - started
    if finished.returncode:
        if engine == "spark":
            raise SystemExit(f"spark failed:\n{finished.stderr[-4000:]}")
        errors = [line for line in finished.stderr.splitlines() if "Error" in line or "Exception" in line]
        return {"failed": errors[-1][:120] if errors else f"exit {finished.returncode}"}
    return {"seconds": seconds, **json.loads(finished.stdout)}


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


def measure_spark(spark: Any, exports: Path, results: Path) -> dict[str, float]:
    from federation.analytics.data.inputs import read_exports
    from federation.analytics.frames import Window
    from federation.analytics.pipeline import write_results

    window = Window(since=UNTIL - timedelta(days=DAYS), until=UNTIL)
    inputs = read_exports(spark, exports, window)
    begun: list[tuple[str, float]] = []

    def told(text: str) -> None:
        begun.append((text.removeprefix("computing ").replace(" ", "_"), time.monotonic()))

    write_results(inputs, results, window, now=NOW, told=told)
    told("done")
    phases = {name: after - at for (name, at), (_, after) in itertools.pairwise(begun)}
    jvm = spark.sparkContext._gateway.proc.pid
    return {
        "cpu": own_cpu() + cpu_of(jvm),
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


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
