"""A node with ActivityPub switched on, as it is built from its settings; and one without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from federation.activitypub.activities import JOB
from federation.base.errors import ConfigurationError
from federation.base.queues.job_data import ACTIVITY_JOB
from federation.base.settings.settings import KEY_VARIABLES, Settings
from federation.runtime.composition import Federation
from tests.federation.conftest import OWN_URL, MakeSettings

ALICE = f"{OWN_URL}/users/alice"


def test_a_node_has_it_only_where_it_is_on(settings: Settings) -> None:
    """Nor does any other node import a line of it that it has no use for."""
    assert Federation(settings).activitypub is None
    code = (
        "import sys; from federation.base.settings.settings import Settings;"
        "from federation.runtime.composition import Federation; Federation(Settings.from_values({}));"
        "print(*(name for name in sys.modules if name.startswith('federation.activitypub.')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "federation.activitypub.keys" not in told


def test_without_a_name_or_keys_it_is_refused_by_name() -> None:
    """All that is missing at once, before anything is opened."""
    with pytest.raises(ConfigurationError) as error:
        Federation(Settings.from_values({"federation_activitypub": "1"}))
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["BETTER_AUTH_URL", *KEY_VARIABLES]


async def test_an_actor_is_made_as_the_settings_say(make_settings: MakeSettings) -> None:
    """Its key is as long as they say."""
    assert JOB == ACTIVITY_JOB
    node = Federation(make_settings(federation_activitypub="1", federation_activitypub_key_bits="3072"))
    try:
        parts = node.activitypub
        assert parts is not None
        async with node.outbox.transaction() as session:
            actor = await session.run_sync(parts.actors.add, ALICE)
        key = await parts.keys.signing_key(ALICE)
        assert (key.key_id, key.private.key_size) == (actor.key_id, 3072)
    finally:
        await node.close()
