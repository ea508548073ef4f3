"""What has to be true of a world."""

from __future__ import annotations

from tests.simulation.world import World


def look(world: World, now: float) -> None:
    """Nothing yet."""


def judge(world: World, now: float) -> None:
    rows = world.space.rows("SELECT id, state, held_reason, server_url, error_code, last_error FROM delivery_jobs")
    for owed in world.owed:
        if not owed.is_poison and owed.activity_id not in world.servers[owed.server].first_applied:
            print("not applied", owed, [row for row in rows if row[0] == owed.delivery_id], world.servers[owed.server].planned.phases[-1:])
