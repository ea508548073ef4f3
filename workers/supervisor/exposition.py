"""Metrics of several processes as one text, in the format that Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

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
