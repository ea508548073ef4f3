"""What a store holds: the manifest with the greatest number names every file, and what no manifest names is not there.

    OUT/_manifests/000000000012.json    written once, if there is none of that number; then never changed
    OUT/data/RUN/…                      files with names of their own, written before a manifest names them

A writer goes by manifest N and commits N + 1: of two, one does. A reader goes by one manifest from its beginning to its
end, for which it has a day: older manifests, and files that none names, are removed when they are a day old by the
store's own clock.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Final

from federation.analytics.data.stored_files import DataFile
from federation.analytics.data.stores import Store, StoredObject
from federation.analytics.errors import StoreUnusable

MANIFESTS: Final = "_manifests"
DATA: Final = "data"
VERSION: Final = 1
KEPT: Final = timedelta(days=1)
"""How long what is superseded stays, for those who read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that one moment of a store holds. It grows with the days that are kept, not with their rows."""

    number: int = 0
    """0 is that of a store to which nothing was ever committed."""
    run: str = ""
    """Which run committed it."""
    partitions: Mapping[str, tuple[DataFile, ...]] = field(default_factory=dict)
    """Files by partition, as `server_daily/day=2026-11-21`. One without files was computed, and is empty."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Names in the store by name, as `report.html`."""
    exported_on: str | None = None
    """The UTC day on which the registry was exported."""

    @property
    def name(self) -> str:
        return f"{MANIFESTS}/{self.number:012d}.json"

    @property
    def named(self) -> set[str]:
        """Every object that it names."""
        return {file.name for files in self.partitions.values() for file in files} | set(self.texts.values())

    def encoded(self) -> bytes:
        partitions = {name: [asdict(file) for file in files] for name, files in sorted(self.partitions.items())}
        told = {
            "version": VERSION,
            "run": self.run,
            "exported_on": self.exported_on,
            "texts": dict(self.texts),
            "partitions": partitions,
        }
        return json.dumps(told, separators=(",", ":")).encode()


def latest_manifest(store: Store) -> Manifest:
    """Return the manifest that readers go by now.

    Raises:
        StoreUnusable: the store does not answer, or holds something else under that name.
    """
    found = _listed(store)
    return _read(store, found[-1].name) if found else Manifest()


def sweep(store: Store) -> int:
    """Remove what nobody reads any more. Return how many objects that were."""
    found = _listed(store)
    if not found:
        return 0
    now = found[-1].modified
    superseded = sum(now - newer.modified >= KEPT for newer in found[1:])
    kept = {each.name for each in found[superseded:]}
    for name in sorted(kept):
        kept |= _read(store, name).named
    there = itertools.chain(store.list(MANIFESTS), store.list(DATA))
    gone = [each.name for each in there if each.name not in kept and now - each.modified >= KEPT]
    store.delete(gone)
    return len(gone)


def _listed(store: Store) -> list[StoredObject]:
    """Return the manifests in the order of their numbers."""
    found = (each for each in store.list(MANIFESTS) if each.name.endswith(".json") and "/." not in each.name)
    return sorted(found, key=lambda each: each.name)


def _read(store: Store, name: str) -> Manifest:
    data = store.read(name)
    try:
        told = json.loads(data)
        if told["version"] != VERSION:
            raise StoreUnusable(f"{store.url}/{name} was written by a later version of this program; use that one")
        partitions = {
            partition: tuple(DataFile(**file) for file in files) for partition, files in told["partitions"].items()
        }
        number = int(name.removeprefix(f"{MANIFESTS}/").removesuffix(".json"))
        return Manifest(
            number=number,
            run=told["run"],
            partitions=partitions,
            texts=told["texts"],
            exported_on=told["exported_on"],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StoreUnusable(f"{store.url}/{name} is no manifest of ours") from None
