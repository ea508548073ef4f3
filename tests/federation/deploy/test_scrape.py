"""What the shipped files scrape is served by what the shipped units start, as they stand but for the ports."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.federation.deploy.places import PROMETHEUS, tool
from tests.federation.deploy.test_units import directives, environment
from tests.federation.monitoring.test_process import answer
from tests.federation.test_run import Folder
from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port

UNITS = ("federation-worker.service", "federation-node.service")
SHIPPED = "prometheus.yml"


def targets() -> list[str]:
    (job,) = yaml.safe_load((PROMETHEUS / SHIPPED).read_text())["scrape_configs"]
    (group,) = job["static_configs"]
    found: list[str] = group["targets"]
    return found


@pytest.fixture
async def ports(folder: Folder) -> dict[str, str]:
    """Both units' processes run, with the ports that they have here, by those that the files name."""
    found: dict[str, str] = {}

    def here(port: str) -> str:
        return found.setdefault(port, str(free_port()))

    for unit in UNITS:
        (command,) = directives(unit)["ExecStart"]
        words = ["federation", *shlex.split(command)[1:]]
        place = words.index("--metrics-port") + 1
        words[place] = here(words[place])
        if "--processes" in words:  # one that answers itself: the supervisor has tests of its own
            first = words.index("--processes")
            del words[first : first + 2]
        variables = environment(unit)
        if "FEDERATION_PORT" in variables:
            variables["FEDERATION_PORT"] = here(variables["FEDERATION_PORT"])
        started = await folder.start(*words, **variables)
        await started.until_logged("node_serving" if "node" in words else "worker_ready")
    return found


def moved(text: str, ports: dict[str, str]) -> str:
    """The file with the ports of here in the place of those that it names."""
    return re.sub(r"(127\.0\.0\.1:)(\d+)", lambda found: found[1] + ports.get(found[2], found[2]), text)


async def test_the_targets_answer_a_scraper_on_the_machine(ports: dict[str, str]) -> None:
    """Each of them, with what is of its side; through the node's own port nobody reads metrics."""
    told = {}
    for target in targets():
        metrics = answer(f"http://{moved(target, ports)}/metrics")
        assert metrics is not None, target
        assert metrics.status_code == 200, target
        told[target] = metrics.text
    worker, node = (told[target] for target in targets())
    assert "federation_delivery_attempts_total" in worker
    assert "federation_inbound_requests_total" in node
    public = answer(f"http://127.0.0.1:{ports['8000']}/metrics")
    assert public is not None
    assert public.status_code == 404


async def test_prometheus_itself_finds_all_of_them_up(ports: dict[str, str], tmp_path: Path) -> None:
    """With the shipped configuration and alerts, scraped as soon as it may be."""
    program = tool("prometheus", package="prometheus")
    text = moved((PROMETHEUS / SHIPPED).read_text(), ports)
    (tmp_path / SHIPPED).write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s"))
    (tmp_path / "alerts.yml").write_text((PROMETHEUS / "alerts.yml").read_text())
    own = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={SHIPPED}", "--storage.tsdb.path=data", f"--web.listen-address={own}")
    with running(program, *options, cwd=tmp_path) as process:

        def health() -> set[str]:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                told: dict[str, Any] = httpx.get(f"http://{own}/api/v1/targets", trust_env=False).json()
            except (httpx.TransportError, ValueError):
                return set()
            return {each["health"] for each in told["data"]["activeTargets"]}

        await until(lambda: health() and "unknown" not in health())
        assert health() == {"up"}


@contextmanager
def running(*command: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process, with its log in `cwd`; it is gone afterwards."""
    with (cwd / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
