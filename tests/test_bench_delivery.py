"""The benchmark of deliveries measures what its options name; a fan-out fits where it has to."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import create_engine, text

from federation.protocol.keys import OwnKeys, generate_own_keys
from federation.protocol.sealing import Envelope, open_envelope, seal
from federation.protocol.signing import verify_signature
from tests import warm
from tests.interop.peer import NodeProcess, install_npm_packages
from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_delivery.py"


@pytest.mark.timeout(900)
def test_a_post_to_many_servers_takes_at_most_1200_bytes_of_valkey_for_each(full: bool) -> None:
    """Its jobs refer to the text and hold no copy of its 2.4 KB."""
    recipients = 20_000 if full else 5_000
    fan_out = [warm.PYTHON, str(SCRIPT), "--fanout", str(recipients)]
    done = subprocess.run(fan_out, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["recipients"], row["payload_bytes"]) == (recipients, 2_400)
    assert 120 < row["redis_mb"] * 1e6 / recipients <= 1_200
    assert row["enqueue_s"] > 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_open_pages_are_measured_beside_none() -> None:
    """In turns, each in a node of its own."""
    few = ["--queue", "sqlite", "--servers", "2", "--deliveries", "40", "--pages", "0", "10"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few], capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["pages"] for row in rows] == [0, 10]
    assert all(row["deliveries_per_s"] > 0 and not row["failed"] for row in rows)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_several_processes_are_measured_from_outside() -> None:
    """With their share of the machine, and their memory."""
    measure = [
        sys.executable,
        str(SCRIPT),
        "--queue",
        "sqlite",
        "--servers",
        "2",
        "--deliveries",
        "40",
        "--processes",
        "2",
    ]
    done = subprocess.run(measure, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["processes"] == 2
    assert 0 < row["worker_cores"] <= 2
    assert row["deliveries_per_s"] > 0
    assert row["supervisor_mib"] < row["memory_mib"] < 200


@pytest.mark.full
def test_a_profile_says_where_a_deliverys_time_goes(tmp_path: Path) -> None:
    """All of it, by part; the stacks behind it are in a file. Over TLS that is a part of its own."""
    few = ["--queue", "sqlite", "--servers", "2", "--deliveries", "200", "--tls", "--profile", str(tmp_path)]
    told = measured(*few)
    (row,), (profile,) = told["rows"], told["profiles"]
    assert told["tls"] is True
    assert (row["failed"], row["held"]) == (0, 0)
    assert sum(profile["us"].values()) / 1000 == pytest.approx(row["cpu_ms_each"], rel=0.3)
    assert all(
        profile["us"][part] > 0 for part in ("HTTP", "TLS", "cryptography", "database", "queue core", "our code")
    )
    lines = Path(profile["file"]).read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == round(sum(profile["us"].values()) * 200)
    assert [path.name for path in tmp_path.iterdir()] == ["sqlite-2-here.folded"]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [[], ["--tls"]], ids=["plain", "tls"])
def test_nodes_worker_is_measured_beside_ours(more: list[str]) -> None:
    """By turns, and both deliver everything; on SQLite there is ours alone."""
    install_npm_packages()
    few = ["--servers", "2", "--deliveries", "40", "--warm-up", "10", "--peer", "node", "--repeat", "2", *more]
    told = measured(*few)
    assert [(row["queue"], row["worker"]) for row in told["rows"]] == [
        ("sqlite", "here"),
        ("bullmq", "here"),
        ("bullmq", "node"),
    ]
    assert all(row["deliveries_per_s"] > 0 and row["cpu_ms_each"] > 0 for row in told["rows"])
    assert all((row["failed"], row["held"]) == (0, 0) for row in told["rows"])
    assert [(row["queue"], row["worker"]) for row in told["ratios"]] == [("bullmq", "here / node")]
    assert told["node-undici"]


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_nodes_worker_writes_what_ours_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of attempts, of follows and of links; its envelopes open, are signed, and it opens ours."""
    install_npm_packages()
    monkeypatch.syspath_prepend(SCRIPT.parent)
    deliveries, in_node = (importlib.import_module(f"bench.{name}") for name in ("deliveries", "in_node"))
    written = {}
    for role in ("worker", "node"):
        with delivering_node(deliveries.node_environment) as environment:
            run_role(role, environment)
            written[role] = rows_of(environment)
            if role == "node":
                keys = deliveries.own_keys(environment)
                async with in_node.node_worker(environment) as node:
                    await envelopes_are_read_by_both_sides(node, keys)
    assert written["node"] == written["worker"]
    attempts, follows, links, owed = written["node"]
    assert (len(attempts), owed) == (20, [])
    assert {row["outcome"] for row in attempts} == {"delivered"}
    assert [row["accepted"] for row in follows] == [True, True]
    assert [(row["state"], row["acknowledged"]) for row in links] == [("up", True)] * 2


def run_role(role: str, environment: Mapping[str, str]) -> None:
    """One of the script's processes has delivered."""
    command = [sys.executable, str(SCRIPT), "--role", role]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def delivering_node(make: Any) -> Iterator[dict[str, str]]:
    """A fresh node on BullMQ, with two peers, that is to deliver 16 after a warm-up of 4."""
    peer_servers = importlib.import_module("bench.peer_servers")
    deliveries = importlib.import_module("bench.deliveries")
    with make("bullmq") as environment, peer_servers.peer_process(2, deliveries.own_keys(environment)) as peers:
        yield {
            **environment,
            "PYTHONPATH": str(SCRIPT.parent.parent),
            "FEDERATION_DELIVERY_CONCURRENCY": "5",
            "BENCH_PEERS": json.dumps(peers.servers),
            "BENCH_DELIVERIES": "16",
            "BENCH_WARM_UP": "4",
        }


def rows_of(environment: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """What a worker wrote, without ids and times, and with servers by their number."""
    urls = [peer["url"] for peer in json.loads(environment["BENCH_PEERS"])]
    queries = (
        "SELECT job_name, method, server_url, attempt, outcome, error_code, http_status, relayed_by, request_bytes,"
        " response_bytes, series, remote_code FROM delivery_attempts ORDER BY server_url, job_name",
        "SELECT follower_server_url, accepted, acknowledged FROM follows ORDER BY follower_server_url",
        "SELECT server_url, state, operator_hold, relayed, acknowledged, evidence, rejections, needs_canary, probes,"
        " rests, release_start, release_rate, reason, evidence_at, rest_until, release_at"
        " FROM server_links ORDER BY server_url",
        "SELECT id FROM delivery_jobs",
    )
    engine = create_engine(environment["DATABASE_URL"])
    with engine.connect() as connection:
        tables = [[dict(row._mapping) for row in connection.execute(text(query))] for query in queries]
    engine.dispose()
    for row in (row for table in tables for row in table):
        for column in ("server_url", "follower_server_url"):
            if column in row:
                row[column] = sorted(urls).index(row[column])
    return tables


async def envelopes_are_read_by_both_sides(node: NodeProcess, keys: OwnKeys) -> None:
    """What Node seals opens here and bears our signature; it opens what is sealed here; a changed one it does not."""
    plaintext, other = '{"text": "Olá, ☃ 🦔"}', generate_own_keys()
    sealed = await node.call("sealed", {"text": plaintext, "key": other.encryption.public_text})
    assert open_envelope(Envelope.from_wire(sealed["payload"]), other.encryption.secret) == plaintext
    assert verify_signature(plaintext, sealed["signature"], keys.signing.public_text)
    envelope = seal(plaintext, keys.encryption.public).to_wire()
    assert await node.call("opened", envelope) == plaintext
    with pytest.raises(AssertionError):
        await node.call("opened", {**envelope, "ciphertext": "AAAA" + envelope["ciphertext"][4:]})


def measured(*options: str) -> dict[str, Any]:
    """What a small run tells."""
    command = [warm.PYTHON, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told
