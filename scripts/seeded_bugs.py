"""Bugs for `scripts/mutate --simulation`: in what decides about deliveries, links, looks, sweeps and leases.

Each is a mistake that somebody could make. What a bug names is found by the end of its dotted name.
"""

from __future__ import annotations

from typing import Final

from seeded import Bug, returns, swap, without

BUGS: Final = (
    # What becomes of a delivery
    Bug(
        "used up on an absent server: failed, not held",
        "decision.fate_of",
        swap(
            "if kind is FailureClass.UNAVAILABLE:\n    return HELD_FOR_SERVER",
            "if kind is FailureClass.UNAVAILABLE:\n    return FAILED",
        ),
    ),
    Bug(
        "a refused canary goes on trying",
        "decision.fate_of",
        swap("kind is FailureClass.REJECTED and series.is_canary and not link.is_open", "False"),
    ),
    Bug("a fault of ours holds without an end", "decision.ours", swap("now + own_pause(series.holds)", "None")),
    Bug("a fault of ours always holds for a minute", "decision.own_pause", returns("FIRST_OWN_PAUSE")),
    Bug(
        "fails alone: compared the wrong way round",
        "decision.fails_alone",
        swap("link.last_success_at >= series.first_attempted_at", "link.last_success_at < series.first_attempted_at"),
    ),
    Bug("silent: for ever", "host_limits._first_byte", swap("now < server.silent_until", "server.silent_until")),
    Bug("fails alone: never", "decision.fails_alone", returns("False")),
    Bug("fails alone: also where nothing answers", "decision.fails_alone", swap("answers(code)", "True")),
    Bug("alone: given up at once", "decision.alone", returns("FAILED")),
    Bug("alone: never given up", "decision.alone", swap("series.alone >= len(ALONE_PAUSES)", "False")),
    Bug("alone: the first pause each time", "decision.alone", swap("ALONE_PAUSES[series.alone]", "ALONE_PAUSES[0]")),
    Bug("too large counts as an outage", "sealed.codes.class_of_status", swap("status in TOO_LARGE", "False")),
    Bug("a page counts as a refusal", "sealed.codes.class_of_status", swap("not is_json", "False")),
    Bug(
        "a rest counts as an outage",
        "sealed.codes.class_of_status",
        swap("return FailureClass.REST", "return FailureClass.UNAVAILABLE"),
    ),
    Bug(
        "an outage is not told to the link",
        "DeliveryProcessor._note_unavailable",
        without("await links.unavailable(server_url, code, moved_to=moved_to)"),
    ),
    Bug(
        "a used-up series is not told to the link",
        "DeliveryProcessor._note_unavailable",
        without("await links.exhausted(server_url, code, first_attempted_at=series.first_attempted_at)"),
    ),
    Bug(
        "a failed canary is not told to the link",
        "DeliveryProcessor._note_unavailable",
        without("await links.probe_failed(server_url)"),
    ),
    Bug(
        "a success is not told to the link",
        "DeliveryProcessor._note_arrival",
        without("await self._links_of(report).succeeded(delivery.server_url, relayed=relayed)"),
    ),
    Bug(
        "a rest is not told to the link",
        "DeliveryProcessor._fate",
        without("await links.rests(server_url, failure.at_least if isinstance(failure, RetryableFailure) else None)"),
    ),
    Bug("a failed attempt is not in the log", "DeliveryProcessor._fail", swap("attempt=record", "attempt=None")),
    Bug(
        "a delivered attempt is not in the log",
        "DeliveryProcessor._note_arrival",
        swap("attempt=None if series is None else record", "attempt=None"),
    ),
    Bug(
        "the last attempt says nothing of being it",
        "DeliveryProcessor._fail",
        without("report.seen.note = AttemptNote.GIVEN_UP"),
    ),
    Bug("busy without an end", "DeliveryProcessor._hold_busy", swap("self._clock.now() + pause", "None")),
    Bug(
        "blacklist not asked before an attempt",
        "DeliveryProcessor._is_held",
        without("await self._refuse_blacklisted(report.delivery)"),
    ),
    Bug(
        "a link is not looked at before an attempt",
        "DeliveryProcessor._is_held",
        swap("report.link.hold(self._clock.now())", "None"),
    ),
    # The row and its jobs
    Bug("any job may act for a row", "statements._acts_for", swap("row.job_id in (None, job_id)", "True")),
    Bug("attempts counted twice", "statements._BEGUN", swap("TABLE.c.attempts + 1", "TABLE.c.attempts + 2")),
    Bug("sending is not noted", "statements._BEGUN", swap('bindparam("number")', "None")),
    Bug(
        "a lost attempt is not recorded",
        "Group._begin",
        swap("row.sending is not None and row.sending != entry.attempt", "False"),
    ),
    Bug(
        "each attempt begins its series",
        "statements._BEGUN",
        swap("func.coalesce(TABLE.c.first_attempted_at, bindparam('at'))", "bindparam('at')"),
    ),
    Bug(
        "canaries are held like all others",
        "Group._begin",
        swap("entry.hold is not None and not (series.is_canary and entry.hold.may_be_tried)", "entry.hold is not None"),
    ),
    Bug(
        "a canary goes out whatever its server waits for",
        "Group._begin",
        swap("series.is_canary and entry.hold.may_be_tried", "series.is_canary"),
    ),
    Bug("an attempt that lost its job is heard like the one that has it", "statements._is_late", returns("False")),
    Bug("what arrived frees nobody of its key", "Group._remove", without("self._freed += arrived")),
    Bug("what failed frees nobody of its key", "Group._end", without("self._freed.append(row)")),
    Bug("suspects are never narrowed down", "statements._narrowed", returns("suspect")),
    Bug("a delivered row is not removed", "Group._remove", swap('{"rows": ids}', '{"rows": []}')),
    Bug("held without a series of its own", "rows._READY", swap("TABLE.c.series + 1", "TABLE.c.series")),
    Bug(
        "a begun row stays counted as waiting",
        "statements._BEGUN",
        swap("released_at=None", "released_at=TABLE.c.released_at"),
    ),
    # Order
    Bug(
        "order ignored on enqueue",
        "ordering._stand",
        swap(
            "HoldReason.ORDER if line is not None else HoldReason.SERVER if url in closed else None",
            "HoldReason.SERVER if url in closed else None",
        ),
    ),
    Bug(
        "the youngest of a key is next",
        "rows._FIRST",
        swap("TABLE.c.ordering_position", "TABLE.c.ordering_position.desc()"),
    ),
    Bug(
        "a follow is cancelled although it was attempted",
        "ordering._cancel_unsent",
        swap("last is None or last.job_name != job_name or last.attempts", "last is None or last.job_name != job_name"),
    ),
    Bug("next in order never released", "rows.next_in_order", returns("[]")),
    # Sweeps
    Bug("due holds are never released", "HeldSweeper._release_due", returns("0")),
    Bug(
        "holds are released before their time",
        "held.sweeper._DUE",
        swap('TABLE.c.next_attempt_at <= bindparam("now")', "TABLE.c.next_attempt_at.is_not(None)"),
    ),
    Bug(
        "servers that are back are forgotten",
        "HeldSweeper._look_at_servers",
        swap("await links.release_held(row.server_url)", "pass"),
    ),
    Bug(
        "blacklist not checked for what is held",
        "HeldSweeper._look_at_servers",
        swap("await self._blacklist.covering(row.server_url) is not None", "False"),
    ),
    Bug("expiry after a day", "HeldSweeper._expire_batch", swap("now - self._max_age", "now - self._max_age / 7")),
    Bug("suspects all at once", "HeldSweeper._release_suspects", swap("max(widest, 1)", "1_000")),
    Bug(
        "suspects beside those under way",
        "HeldSweeper._release_suspects",
        swap("connection.execute(_SUSPECTS_UNDER_WAY, ours).first() is not None", "False"),
    ),
    Bug("news of held deliveries bring no look", "HeldSweeper.newly_held", returns("[]")),
    Bug("the sweeper adds nothing that is missing", "OutboxSweeper._add_missing", returns("0")),
    Bug("the sweeper never begins a new series", "OutboxSweeper._renewed", returns("[]")),
    Bug("a lost queue is not noticed", "OutboxSweeper.lacks_jobs", returns("False")),
    Bug(
        "a gap between sweeps spares nothing",
        "sweep_times.after_sweep",
        swap("left = left or SPARED.total_seconds()", "left = 0.0"),
    ),
    Bug("once spared, always spared", "sweep_times.after_sweep", swap("max(left - gap.total_seconds(), 0.0)", "left")),
    # Links
    Bug(
        "a link never falls by buckets",
        "link_rules.after_unavailable",
        swap("link.evidence >= BUCKETS_TO_FALL", "False"),
    ),
    Bug(
        "one failure takes a link down",
        "link_rules.after_unavailable",
        swap("link.evidence >= BUCKETS_TO_FALL", "True"),
    ),
    Bug(
        "each failure is evidence",
        "link_rules.after_unavailable",
        swap("_bucket(link.evidence_at) == _bucket(now)", "False"),
    ),
    Bug("a success leaves the evidence", "link_rules.after_success", swap("evidence=0", "evidence=link.evidence")),
    Bug(
        "a used-up series takes every link down",
        "link_rules.after_exhausted",
        swap("link.state is not LinkState.UP or succeeded", "link.state is not LinkState.UP"),
    ),
    Bug(
        "rests are ignored",
        "Link.hold",
        swap("None if until is None else Hold(reason=HoldReason.REST, until=until)", "None"),
    ),
    Bug(
        "a rest ends at once",
        "link_rules.after_rest",
        swap("now + min(max(pause, SHORTEST_REST), LONGEST_REST)", "now + SHORTEST_REST"),
    ),
    Bug(
        "the longest rest is forgotten by a shorter one",
        "link_rules.after_rest",
        without("until = max(until, link.rest_until)"),
    ),
    Bug(
        "a link that falls again begins anew",
        "link_rules.fallen",
        swap("0 if link.fell_at is None else link.probes", "0"),
    ),
    Bug(
        "a link that comes up releases nothing",
        "link_rules.raised",
        swap("None if link.operator_hold else now", "None"),
    ),
    Bug("an operator's hold is no hold", "Link.is_open", returns("self.state is LinkState.UP")),
    Bug("looks never get rarer", "link_rules.probe_interval", returns("FIRST_PROBES[0]")),
    Bug(
        "looks get rarer without a limit",
        "link_rules.probe_interval",
        swap("min(planned, max(timedelta(minutes=2), away / PROBED_PART))", "planned"),
    ),
    Bug(
        "no look after the fourth",
        "link_rules.after_failed_probe",
        swap("next_probe_at=now + pause", "next_probe_at=now + pause if link.probes < 4 else None"),
    ),
    Bug("a refused canary ends the look", "link_rules.after_refused_canary", returns("after_failed_probe(link, now)")),
    Bug(
        "a mismatch ends by an acknowledgment",
        "link_rules.after_success",
        swap("link.state is LinkState.MISMATCH", "False"),
    ),
    Bug("news bring looks without a limit", "link_rules.was_just_looked_at", returns("False")),
    Bug(
        "who takes a look does not move the next",
        "Links.take_probe",
        swap("now + link_rules.FIRST_PROBES[0]", "link.next_probe_at"),
    ),
    Bug("a taken look is never made again", "Links.take_probe", swap("now + link_rules.FIRST_PROBES[0]", "None")),
    Bug(
        "two processes make the same look",
        "Links.take_probe",
        swap("_TABLE.c.next_probe_at == link.next_probe_at", "True"),
    ),
    Bug("links are remembered for a day", "links.CACHE_TTL", swap("timedelta(seconds=5)", "timedelta(days=1)")),
    Bug(
        "no guard against looks far off",
        "links._PROBE_DUE",
        swap('_TABLE.c.next_probe_at > bindparam("latest")', "_TABLE.c.next_probe_at.is_(None)"),
    ),
    # Looks and releases
    Bug(
        "a server that takes no posts is raised by /discover",
        "LinkProbes.look",
        swap("link.state is LinkState.MISMATCH or not await self._send_canary(url, link.wire)", "True"),
    ),
    Bug(
        "a mismatch is looked at by a canary",
        "LinkProbes.look",
        swap(
            "link.state is LinkState.MISMATCH or not await self._send_canary(url, link.wire)",
            "not await self._send_canary(url, link.wire)",
        ),
    ),
    Bug(
        "held servers are looked at",
        "LinkProbes.look",
        swap("link.operator_hold or await self._blacklist.covering(url) is not None", "False"),
    ),
    Bug(
        "another key is not seen",
        "probe._seen",
        swap("document.public_key != server.public_key", "False"),
    ),
    Bug(
        "a probe raises what fell by deliveries",
        "Probe.__call__",
        swap(
            "is_well and (await self._links.find(server.url)).state is LinkState.UP",
            "is_well and await self._links.returned(server.url, reason='probe')",
        ),
    ),
    Bug(
        "two canaries at a time",
        "Releaser.send_canary",
        swap("connection.execute(_CANARY_UNDER_WAY, _way(link)).first() is not None", "False"),
    ),
    Bug(
        "always the same canary",
        "release._canary",
        swap(
            "untried or connection.execute(_TRIED_LONGEST_AGO, values).scalar_one_or_none()",
            "connection.execute(_OLDEST, {'server': link.server_url, 'most': 1}).scalar_one_or_none()",
        ),
    ),
    Bug(
        "released newest first", "release._OLDEST", swap("_CANDIDATES.c.created_at", "_CANDIDATES.c.created_at.desc()")
    ),
    Bug("released all at once", "release._batch", returns("1_000")),
    Bug(
        "the rate of a release never rises",
        "Releaser._after_batch",
        swap("link.release_rate * 2**part", "link.release_rate"),
    ),
    Bug("a release stops after its first batch", "Releaser._after_batch", swap("count < limit", "True")),
    Bug(
        "a release goes on during a rest",
        "Releaser._release",
        swap("link.rest_until is not None and link.hold(now) is not None", "False"),
    ),
    # Turns at recurring jobs, and workers
    Bug(
        "a lease keeps nobody away",
        "Leases.take",
        swap("row.leased_until is not None and now < row.leased_until <= now + self.duration + SKEW", "False"),
    ),
    Bug(
        "a run is not counted as one",
        "Leases.take",
        swap(
            "row.started_at is not None and row.started_at - SKEW <= now < row.started_at + EARLY * interval", "False"
        ),
    ),
    Bug(
        "a lease ahead of the clock is believed",
        "Leases.take",
        swap("now < row.leased_until <= now + self.duration + SKEW", "now < row.leased_until"),
    ),
    Bug(
        "a run ahead of the clock is believed",
        "Leases.take",
        swap(
            "row.started_at - SKEW <= now < row.started_at + EARLY * interval",
            "now < row.started_at + EARLY * interval",
        ),
    ),
    Bug(
        "a lost attempt is settled all the same",
        "Runner.run",
        swap("attempt.signal.reason is SignalReason.LEASE_LOST or attempt.abandoned", "False"),
    ),
    Bug(
        "leases are renewed too late", "LeaseKeeper._renew", swap("asked_at + claim.lease.total_seconds()", "asked_at")
    ),
    Bug(
        "expired leases are not recovered",
        "Reaper._recover_some",
        swap(
            "await self._storage.recover(BATCH, max_stalls=self._max_stalls)",
            "await self._storage.recover(0, max_stalls=self._max_stalls)",
        ),
    ),
    Bug("claims go on without a database", "DatabaseWatch.not_ready", returns("None")),
    Bug(
        "suspects run beside others",
        "CrashSuspects.enter",
        swap("not self._inside or (self._suspects_inside is suspect and not self._waiting[not suspect])", "True"),
    ),
    Bug("the database's clock is the machine's", "DatabaseClock.now", swap("self._measured is None", "True")),
)
