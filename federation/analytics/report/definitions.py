"""How the report's numbers are defined, for its readers."""

from __future__ import annotations

from typing import Final

from federation.analytics.report.findings import BAD_DAY
from federation.analytics.report.markup import Markup, join, tag
from federation.analytics.report.wording import percent

_DEFINITIONS: Final = (
    (
        "Attempt",
        "One request to a server that carried a delivery. A delivery that was given back because the server was busy"
        " (parked) was not attempted. A delivery may take up to five attempts.",
    ),
    (
        "Got through",
        "Attempts that were acknowledged, divided by all attempts. In tables that is multiplied, over 7 and 30 days, by"
        " the share of the time in which the server was up, as what is owed to a server that is down waits and burns no"
        " attempts; also called availability. Where the two differ in a list, both are told.",
    ),
    (
        "Owed, held, lost",
        "A delivery is owed until its server acknowledges it. It is held while it waits for the server or for us, and"
        " is to be sent otherwise. It is lost when the server refuses it for good, or when it is too old. What is owed"
        " is so now, what is lost is so by when it was given up.",
    ),
    (
        "New, vanished",
        "A new server is in the registry, and was not in the earliest results of these days; a vanished one was in some"
        " of them, and is not now. A server that is not in the registry is neither.",
    ),
    (
        "MTTF, MTTR",
        "Mean time to failure: the time in which a server was up in 30 days, divided by its outages. Mean time to"
        " repair: how long its outages lasted that ended in these days. The typical server's are medians.",
    ),
    (
        "Saved by relays",
        "Deliveries that another server took along, because the direct way was broken. They count as got through.",
    ),
    (
        "Top 10",
        "The share of the attempts that went to the ten servers with the most of them.",
    ),
    (
        "Healthy",
        "What the health history says: a server is unhealthy from a network failure until a probe or a delivery gets"
        " through. A day's number is that of its end. Servers that were removed from the registry count on no day.",
    ),
    (
        "Since",
        "For an unhealthy server, when it became so. For any other, the first of the days on end, up to its last day"
        f" with attempts, on which less than {percent(BAD_DAY)} got through; where its last day was a good one,"
        " how many of its days were not.",
    ),
    (
        "p50, p95",
        "How long half, or all but one in twenty, of the attempts that got through took; how long a failure takes says"
        " only what our deadline is. Percentiles are approximate. Over several days they are the median of the daily"
        " ones, because percentiles cannot be added up.",
    ),
    (
        "Change",
        "The last 7 days against the 7 before; against half of the days where fewer than 14 have been computed."
        " A point is a hundredth of all attempts.",
    ),
    (
        "Score",
        "From 0 to 100: mostly the share of attempts that got through, failures of our own left out, then the time the"
        " server was up, then its latency; less by the part of its deliveries that is owed or was lost, and nothing for"
        " a server that is down for three days. federation/analytics/figures/scorecard.py has the formula.",
    ),
    (
        "Advice",
        "The more urgent of what the 7 and the 30 days suggest: review for blacklist (its keys are not its own, or a"
        " tenth of its answers are signed with another's), prune (down for a month), park (down, or taking nothing, for"
        " days), watch (unreliable lately, losing deliveries, acknowledging badly, slow, often down, reached by relays,"
        " owed something for days though it is up, or not in the registry), keep. What is well for the later half of a"
        " window is well. It is advice; nothing acts on it by itself.",
    ),
    (
        "This node's own trouble",
        "Hours in which more than half of the servers tried on a day, and at least three, went down together, or days"
        " on which this node did nothing at all. They are nobody's outage, in any advice.",
    ),
    (
        "Relay ranking",
        "Healthy servers that took direct deliveries in the last 7 days: availability times latency times how recently"
        " they were seen, each from 0 to 1.",
    ),
    (
        "Suspicious key",
        "Shared: several servers have it, or one has it for both uses. Changed: it is another than in the registry of"
        " an earlier run, and no rotation explains it. Malformed: it is not the base64 of 32 bytes.",
    ),
    ("Rows set aside", "Rows of the inputs that cannot be true or cannot be read. They are kept, with the reason."),
)


def definitions() -> Markup:
    """Return the definitions as a list of terms."""
    return tag("dl", *(join(tag("dt", term), tag("dd", text)) for term, text in _DEFINITIONS), class_="defined")
