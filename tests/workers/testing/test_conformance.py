"""The conformance suite over every storage, and that the suite covers what it claims to."""

from __future__ import annotations

import pytest

from tests.workers.harnesses import HARNESSES, OpenHarness
from workers.storage.base import Capabilities
from workers.testing import GUARANTEES, Case, Harness, MemoryHarness, all_cases, run
from workers.testing.case import NAME_FILTER, ORDERING_KEYS
from workers.testing.case import case as case_of_the_suite


@pytest.mark.parametrize("open_harness", HARNESSES.values(), ids=HARNESSES.keys())
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
async def test_conformance(case: Case, open_harness: OpenHarness, request: pytest.FixtureRequest) -> None:
    """The storage keeps the promise of the case, or declares in its capabilities that it cannot."""
    async with open_harness(case, request) as harness:
        verdict = await run(case, harness)
    if verdict.declared is not None:
        pytest.skip(f"declared: {verdict.declared}")


def test_every_guarantee_has_cases() -> None:
    """Each guarantee is shown by at least one case, and each case shows at least one guarantee."""
    covered = {guarantee for case in all_cases() for guarantee in case.guarantees}
    assert covered == set(GUARANTEES)
    assert [case.id for case in all_cases() if not case.guarantees] == []


@pytest.mark.parametrize(("guarantees", "said"), [((), "stands for no guarantee"), ((1, 99), r"no such .*\[99\]")])
def test_a_case_without_a_guarantee_is_refused(guarantees: tuple[int, ...], said: str) -> None:
    """A case that stands for nothing, or for a number that nobody knows, is a `ValueError` and no part of the suite."""

    async def a_promise(harness: Harness) -> None:
        """Something holds."""

    before = all_cases()
    with pytest.raises(ValueError, match=said):
        case_of_the_suite(guarantees=guarantees)(a_promise)
    assert all_cases() == before


def test_cases_have_names_of_their_own() -> None:
    """No two cases share an id, and asking twice gives the same cases."""
    ids = [case.id for case in all_cases()]
    assert len(set(ids)) == len(ids)
    assert [case.id for case in all_cases()] == ids


async def test_a_declared_edge_is_reported() -> None:
    """A case whose needs the capabilities declare away is reported as declared, naming exactly those."""

    class Limited(MemoryHarness):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(clock="client", durable=False, processes="one", ordering_keys=False)

    verdicts = {NAME_FILTER: 0, ORDERING_KEYS: 0}
    for case in all_cases():
        for need in verdicts:
            if case.needs == (need,):
                async with Limited() as harness:
                    verdict = await run(case, harness)
                verdicts[need] += verdict.declared == "ordering_keys"
    assert verdicts[NAME_FILTER] == 0
    assert verdicts[ORDERING_KEYS] >= 4
