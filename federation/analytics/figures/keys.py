"""Suspicious keys in the registry.

- malformed: a key that is not the strict base64 of 32 bytes.
- shared: a key that more than one server has, as either kind, or that one server has as both kinds. A key pair belongs
  to one server, and has one use.
- changed: a key that differs from the earlier registry, other than by a rotation. A rotation proves both old keys,
  replaces both, and keeps the row. So it is an anomaly if only one key of a row changed, if another row (another id)
  took a URL with other keys, or if a key went from one URL to another that did not have it.
- mismatched: the server itself shows another signing key than the registered one, and deliveries to it are held.

Malformed keys belong to nobody: they are not compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import LinkState
from federation.analytics.days import MONTH, utc_day
from federation.analytics.frames import KEY_ANOMALIES, AnomalyKind, Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEY: Final = "[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]="
"""Strict base64 of 32 bytes: the last letter carries four bits, the other two are zero."""

SIGNING: Final = "signing"
ENCRYPTION: Final = "encryption"
BOTH: Final = "signing and encryption"
_KINDS: Final = {SIGNING: "public_key", ENCRYPTION: "encryption_public_key"}
_IDENTITY: Final = ("kind", "key_kind", "fingerprint", "server_urls", "detail")


def key_anomalies(
    servers: DataFrame,
    *,
    earlier: DataFrame | None,
    window: Window,
    links: DataFrame | None = None,
    known: DataFrame | None = None,
    accepted: DataFrame | None = None,
) -> DataFrame:
    """Find every key that is malformed, shared, changed outside a rotation or not shown; see `KEY_ANOMALIES`.

    `earlier` is the registry as an earlier run saw it. Without it no change can be found, without `links` no mismatch.
    A change stands for 30 days: those that are `known` from the run of an earlier day are found again. What is
    `accepted` is not: a change or a mismatch if the registered key is accepted as one of its servers', a shared key if
    it is as all of them's.
    """
    keys = _keys(servers)
    found = _malformed(keys).unionByName(_shared(_sound(keys)))
    if earlier is not None:
        found = found.unionByName(_changed(servers, earlier)).unionByName(_moved(keys, _keys(earlier)))
    if links is not None:
        found = found.unionByName(_mismatched(servers, links))
    found = found.withColumn("found_on", F.lit(window.as_of))
    if known is not None:
        found = found.unionByName(_standing(known, window)).groupBy(*_IDENTITY).agg(F.min("found_on").alias("found_on"))
    if accepted is not None:
        found = _without_accepted(found, accepted)
    return found.withColumn("as_of", F.lit(window.as_of)).to(KEY_ANOMALIES)


def _standing(known: DataFrame, window: Window) -> DataFrame:
    """Return the changes that were found within the month before the window's last day."""
    age = F.datediff(F.lit(window.as_of), "found_on")
    stands = (F.col("kind") == AnomalyKind.CHANGED.value) & (age > 0) & (age < MONTH)
    # Files do not promise that no URL is null, and the schema does.
    urls = F.array_compact("server_urls")
    return known.where(stands).withColumn("server_urls", urls).select(*_IDENTITY, "found_on")


def _without_accepted(found: DataFrame, accepted: DataFrame) -> DataFrame:
    owners = accepted.groupBy("fingerprint").agg(F.collect_set("server_url").alias("owners"))
    is_accepted = F.when(
        F.col("kind") == AnomalyKind.SHARED.value, F.size(F.array_except("server_urls", "owners")) == 0
    ).otherwise(F.arrays_overlap("server_urls", "owners"))
    rows = found.join(F.broadcast(owners), "fingerprint", "left")
    return rows.where(~F.coalesce(is_accepted, F.lit(False))).drop("owners")


def vouched_for(servers: DataFrame, accepted: DataFrame) -> DataFrame:
    """Return the servers whose registered signing key an operator has looked at, and on which day: `accepted_on`."""
    own = servers.select(F.col("url").alias("server_url"), _fingerprint("public_key").alias("fingerprint"))
    return own.join(accepted, ["server_url", "fingerprint"]).select(
        "server_url", utc_day("accepted_at").alias("accepted_on")
    )


def _keys(servers: DataFrame) -> DataFrame:
    """Return one row per server and kind of key."""
    both = F.array(
        *(F.struct(F.lit(kind).alias("key_kind"), F.col(name).alias("key")) for kind, name in _KINDS.items())
    )
    return servers.select("url", F.inline(both))


def _sound(keys: DataFrame) -> DataFrame:
    return keys.where(_is_sound("key"))


def _malformed(keys: DataFrame) -> DataFrame:
    bad = keys.where(~F.coalesce(_is_sound("key"), F.lit(False)))
    detail = F.concat(F.lit("its "), F.col("key_kind"), F.lit(" key is not the base64 of 32 bytes"))
    return _anomaly(bad, AnomalyKind.MALFORMED, F.array("url"), detail, fingerprint=F.lit(None).cast("string"))


def _shared(keys: DataFrame) -> DataFrame:
    users = keys.groupBy("key").agg(
        F.sort_array(F.collect_set("url")).alias("urls"),
        F.array_join(F.reverse(F.sort_array(F.collect_set("key_kind"))), " and ").alias("key_kind"),
        F.count("*").alias("uses"),
    )
    others = F.format_string("%d servers have the same %s key", F.size("urls"), "key_kind")
    detail = F.when(F.size("urls") > 1, others).otherwise("one key serves for signing and for encryption")
    return _anomaly(users.where(F.col("uses") > 1), AnomalyKind.SHARED, F.col("urls"), detail)


def _changed(servers: DataFrame, earlier: DataFrame) -> DataFrame:
    before = earlier.select("url", F.col("id").alias("old_id"), *(F.col(n).alias(f"old_{n}") for n in _KINDS.values()))
    same_row = F.col("id").eqNullSafe(F.col("old_id"))
    changed = {kind: ~F.col(name).eqNullSafe(F.col(f"old_{name}")) for kind, name in _KINDS.items()}
    alone = changed[SIGNING] != changed[ENCRYPTION]
    rows = servers.join(before, "url").where(F.when(same_row, alone).otherwise(changed[SIGNING] | changed[ENCRYPTION]))
    kind = (
        F.when(changed[SIGNING] & changed[ENCRYPTION], BOTH)
        .when(changed[SIGNING], SIGNING)
        .otherwise(F.lit(ENCRYPTION))
    )
    key = F.when(changed[SIGNING], F.col("public_key")).otherwise(F.col("encryption_public_key"))
    detail = F.when(
        same_row, F.concat(F.lit("its "), kind, F.lit(" key changed alone: a rotation changes both"))
    ).otherwise("its registry row was replaced by another with other keys: a rotation keeps the row")
    shaped = rows.select("url", kind.alias("key_kind"), key.alias("key"), detail.alias("why"))
    return _anomaly(shaped, AnomalyKind.CHANGED, F.array("url"), F.col("why"))


def _moved(keys: DataFrame, earlier: DataFrame) -> DataFrame:
    """Find keys that a URL has now and did not have, while another had them and does not have them now."""
    has, had = _sound(keys).select("key", "url").distinct(), _sound(earlier).select("key", "url").distinct()
    gained, lost = has.join(had, ["key", "url"], "left_anti"), had.join(has, ["key", "url"], "left_anti")
    moves = gained.join(lost.withColumnRenamed("url", "from_url"), "key").join(
        _sound(keys).select("key", "url", "key_kind"), ["key", "url"]
    )
    detail = F.format_string("a key of %s became the %s key of %s", "from_url", "key_kind", "url")
    return _anomaly(moves, AnomalyKind.CHANGED, F.sort_array(F.array("url", "from_url")), detail)


def _mismatched(servers: DataFrame, links: DataFrame) -> DataFrame:
    shown = links.where(F.col("state") == LinkState.MISMATCH.value).withColumnRenamed("server_url", "url")
    rows = servers.join(shown, "url").select(
        "url", "since", F.lit(SIGNING).alias("key_kind"), F.col("public_key").alias("key")
    )
    told = "shows another signing key than the registered one since %s: what is sent to it is held"
    detail = F.format_string(told, utc_day("since").cast("string"))
    return _anomaly(rows, AnomalyKind.MISMATCHED, F.array("url"), detail)


def _anomaly(
    rows: DataFrame, kind: AnomalyKind, urls: Column, detail: Column, *, fingerprint: Column | None = None
) -> DataFrame:
    return rows.select(
        F.lit(kind.value).alias("kind"),
        "key_kind",
        (_fingerprint("key") if fingerprint is None else fingerprint).alias("fingerprint"),
        F.array_compact(urls).alias("server_urls"),  # so that the type says that none is null
        detail.alias("detail"),
    )


def _is_sound(column: str) -> Column:
    return F.col(column).rlike(rf"^{KEY}\z")


def _fingerprint(column: str) -> Column:
    return F.when(_is_sound(column), F.sha2(F.unbase64(F.col(column)), 256))
