"""The conformance suite is a library without pytest; its assertions explain themselves only when rewritten."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("workers.testing")
