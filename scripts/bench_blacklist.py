"""What a large blacklist costs: looking servers up, loading, importing, exporting, memory, and the lag of a change.

    python scripts/bench_blacklist.py [--database sqlite|postgres] [--rules 100000]

Half of the rules are origins, half are domains with a star. Every database is fresh. Prints one JSON object each.
Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import fresh_places, machine, unwind_when_terminated

from db import Database
from db.migrate import upgrade
from federation.admin import blacklist
from federation.base.logs import configure_logging
from federation.servers.blacklist import Blacklist, load_rules
from federation.servers.rules import RuleSet

LOOK_UPS = 20_000
ROUNDS = 5
LAGS = 10


def main() -> None:
    """Measure on each database asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", nargs="+", default=["sqlite", "postgres"], choices=["sqlite", "postgres"])
    parser.add_argument("--rules", type=int, default=100_000)
    options = parser.parse_args()
    configure_logging("warning")
    unwind_when_terminated()
    for kind in options.database:
        with fresh_places(kind) as values:
            url = values["DATABASE_URL"]
            upgrade(url)
            print(json.dumps({"database": kind, **machine(), **asyncio.run(measure(url, options.rules))}), flush=True)


async def measure(url: str, count: int) -> dict[str, float]:
    database = Database(url)
    results: dict[str, float] = {"rules": count}
    file = io.BytesIO(("server_url,reason\n" + "".join(f"{rule(n)},spam\n" for n in range(count))).encode())

    started = time.perf_counter()
    plan = await blacklist.plan_import(database, file)
    results["plan_s"] = time.perf_counter() - started
    started, cpu = time.perf_counter(), time.process_time()
    await blacklist.apply_import(database, plan)
    results |= {"import_s": time.perf_counter() - started, "import_cpu_s": time.process_time() - cpu}
    file.seek(0)
    started = time.perf_counter()
    await blacklist.plan_import(database, file)
    results["plan_again_s"] = time.perf_counter() - started
    del plan, file

    started = time.perf_counter()
    await blacklist.export_csv(database, io.StringIO())
    results["export_s"] = time.perf_counter() - started

    rules = await load_rules(database)
    for name, known in (("load", None), ("reload", rules)):
        loads, costs = [], []
        for _ in range(ROUNDS):
            started, cpu = time.perf_counter(), time.process_time()
            await load_rules(database, known=known)
            loads.append(time.perf_counter() - started)
            costs.append(time.process_time() - cpu)
        results |= {f"{name}_s": statistics.median(loads), f"{name}_cpu_s": statistics.median(costs)}
    results |= look_ups(rules, count)
    results["memory_mib"] = await memory(database)
    results |= await lags(url, database)
    await database.close()
    return {name: round(value, 3) for name, value in results.items()}


def rule(number: int) -> str:
    return f"https://server-{number}.evil.example" if number % 2 else f"*.domain-{number}.spam.example"


def look_ups(rules: RuleSet, count: int) -> dict[str, float]:
    """Measure microseconds of CPU for each, the median of a few rounds, over many different URLs."""
    numbers = [7_919 * n % count for n in range(LOOK_UPS)]
    kinds = {
        "covered_by_origin": [f"https://server-{n | 1}.evil.example" for n in numbers],
        "covered_by_star": [f"https://a.b.domain-{n & ~1}.spam.example" for n in numbers],
        "not_covered": [f"https://server-{n}.good.example" for n in numbers],
        "not_covered_with_port": [f"http://server-{n}.good.example:8080" for n in numbers],
        "other_spelling": [f"HTTPS://Server-{n | 1}.Evil.Example:443/" for n in numbers],
        "of_100_labels": [f"https://{'a.' * 100}{n}x.example" for n in numbers],
    }
    return {f"{name}_cpu_us": _each(rules, urls, name.startswith(("covered", "other"))) for name, urls in kinds.items()}


def _each(rules: RuleSet, urls: list[str], expected: bool) -> float:
    now, rounds = time.time(), []
    for _ in range(ROUNDS):
        started = time.process_time()
        hits = sum(rules.covering(url, now) is not None for url in urls)
        rounds.append((time.process_time() - started) / len(urls) * 1e6)
        assert hits == (len(urls) if expected else 0)
    return statistics.median(rounds)


async def memory(database: Database) -> float:
    gc.collect()
    tracemalloc.start()
    rules = await load_rules(database)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(rules)
    return taken / 2**20


async def lags(url: str, database: Database) -> dict[str, float]:
    """Measure the seconds from the commit of a rule, over another connection pool, until a busy process applies it."""
    elsewhere, known, seen, costs = Database(url), Blacklist(database), [], []
    await known.covering("https://x.example")
    for number in range(LAGS):
        target = f"https://late-{number}.example"
        await blacklist.add(elsewhere, target, reason="spam")
        committed = time.perf_counter()
        while True:
            started = time.perf_counter()
            found = await known.covering(target)
            costs.append(time.perf_counter() - started)
            if found:
                break
            await asyncio.sleep(0.002)
        seen.append(time.perf_counter() - committed)
    await known.close()
    await elsewhere.close()
    return {"lag_median_s": statistics.median(seen), "lag_max_s": max(seen), "longest_look_up_s": max(costs)}


if __name__ == "__main__":
    main()
