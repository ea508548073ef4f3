"""What a supervisor tells of its processes on one port: the metrics of all, and whether they live and are ready."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from workers.supervisor.child import ChildProcess
from workers.supervisor.http_port import HttpAnswer
from workers.supervisor.slot import Slot

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def merged(texts: Mapping[int, str]) -> str:
    """Return the texts of processes as one, in which each sample has the label `process`.

    The samples of a metric stand together, below its `HELP` and `TYPE`, as the format wants them.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if not any(each.startswith(line[:7]) for each in head):
                    head.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, number))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in (*lines, *samples.get("", ())))


def _labelled(sample: str, number: int) -> str:
    found = _NAME.match(sample)
    if found is None:
        return sample
    label = f'process="{number}"'
    name, rest = found[0], sample[found.end() :]
    if not rest.startswith("{"):
        return f"{name}{{{label}}}{rest}"
    return f"{name}{{{label}{'' if rest[1:].startswith('}') else ','}{rest[1:]}"


METRICS_PATH: Final = "/metrics"
PROBES: Final = ("/healthz", "/readyz")
ANSWERS_WITHIN: Final = 3.5
"""Seconds; the port gives a client 5."""

DIED: Final = "died"
_ENDS: Final = (DIED, "asked", "replaced", "memory", "late")
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Overview:
    """Answers by path, out of what the processes in `slots` answer."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        # They exist from the start, at 0: if a series begins with its first increment, `increase` does not see that.
        self._ends: Counter[str] = Counter(dict.fromkeys(_ENDS, 0))

    def note_end(self, child: ChildProcess) -> None:
        """Count the end of a process."""
        self._ends[child.stopping or DIED] += 1

    async def __call__(self, path: str) -> HttpAnswer | None:
        """Answer a GET, or return None if there is nothing at that path."""
        if path == METRICS_PATH:
            answers = await self._ask(path)
            texts = {number: answer.body.decode() for number, answer in answers.items() if answer is not None}
            return HttpAnswer(status=200, content_type=_METRICS_TYPE, body=(self._own() + merged(texts)).encode())
        if path in PROBES:
            return _probed(await self._ask(path), len(self._slots))
        return None

    async def _ask(self, path: str) -> Mapping[int, HttpAnswer | None]:
        working = [slot.child for slot in self._slots if slot.child is not None and slot.child.is_ready]
        answers = await asyncio.gather(*(child.get(path, ANSWERS_WITHIN) for child in working))
        return {child.number: answer for child, answer in zip(working, answers, strict=True)}

    def _own(self) -> str:
        ready = sum(slot.child is not None and slot.child.is_ready for slot in self._slots)
        lines = [
            "# HELP workers_processes Processes of this supervisor, those wanted and those that work.",
            "# TYPE workers_processes gauge",
            f'workers_processes{{state="wanted"}} {len(self._slots)}',
            f'workers_processes{{state="ready"}} {ready}',
            "# HELP workers_process_ends_total Processes that ended, by the reason.",
            "# TYPE workers_process_ends_total counter",
            *(f'workers_process_ends_total{{reason="{reason}"}} {number}' for reason, number in self._ends.items()),
        ]
        return "".join(f"{line}\n" for line in lines)


def _probed(answers: Mapping[int, HttpAnswer | None], wanted: int) -> HttpAnswer:
    """Sum up a probe: it succeeds if one process does, because that one works for all."""
    told = {str(number): _read(answer) for number, answer in answers.items()}
    ok = any(answer is not None and answer.status == 200 for answer in answers.values())
    # Without any process there is no event loop to hang: the supervisor is about to start some, or to give up.
    status = 200 if ok or not answers else 503
    text = json.dumps({"status": "ok" if status == 200 else "fail", "wanted": wanted, "processes": told})
    return HttpAnswer(status=status, content_type="application/json", body=text.encode())


def _read(answer: HttpAnswer | None) -> object:
    return {"status": "no answer"} if answer is None else json.loads(answer.body)
