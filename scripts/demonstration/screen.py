"""What a person watches meanwhile, on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Self

from nodes import Node
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tally import Counts, delivered_to, health_of, waiting_for

NOTES_SHOWN = 8
AT_THE_END = ("lost", "duplicates")
"""What means something only then."""


class Screen:
    """Shows the story's steps and, refreshed by `show`, the numbers."""

    def __init__(self, sender: Node, peers: Sequence[Node]) -> None:
        self._console = Console(stderr=True, soft_wrap=True)
        self._sender = sender
        self._peers = peers
        self._notes: list[str] = []
        self._started = time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def note(self, text: str) -> None:
        """Say what happens now."""
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        if self._live is None:
            self._console.print(line, highlight=False, markup=False)
        self._notes.append(line)

    def show(self, tally: Counts) -> None:
        """Refresh the numbers."""
        if self._live is not None:
            notes = Text("\n".join(self._notes[-NOTES_SHOWN:]))
            self._live.update(Group(self._table(), self._totals(tally), notes), refresh=True)

    def summary(self, tally: Counts, problems: Sequence[str]) -> None:
        """Show the end of the story."""
        self.show(tally)
        if self._live is not None:
            self._live.stop()
        self._console.print(self._totals(tally))
        for problem in problems:
            self._console.print(f"NOT AS PROMISED: {problem}", style="bold red", markup=False)
        if not problems:
            self._console.print("Everything arrived, once.", style="bold green")

    def _table(self) -> Table:
        table = Table(title=f"deliveries from {self._sender.url}")
        for column in ("peer", "url", "process", "seen as", "delivered", "still owed"):
            table.add_column(column)
        for peer in self._peers:
            table.add_row(
                peer.name,
                peer.url,
                "up" if peer.process else "[red]down",
                health_of(self._sender, peer),
                str(delivered_to(self._sender, peer)),
                str(waiting_for(self._sender, peer)),
            )
        return table

    def _totals(self, tally: Counts) -> Text:
        numbers = {name: number for name, number in asdict(tally).items() if name not in AT_THE_END}
        return Text("  ".join(f"{name.replace('_', ' ')} {number}" for name, number in numbers.items()))

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
