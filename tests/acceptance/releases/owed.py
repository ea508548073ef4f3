"""What the databases of releases owe."""

from __future__ import annotations

from typing import Final

from tests.acceptance.site import numbered

PLACE: Final = "http://127.0.0.1:7"
"""Where the peer is in these files: a test has it elsewhere."""
QUEUED: Final = numbered("queued", 3)
UNQUEUED: Final = numbered("unqueued", 3)
"""Their jobs were lost."""
HELD: Final = numbered("held", 3)
