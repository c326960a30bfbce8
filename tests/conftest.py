"""Threads for small models; skip what this machine cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# Tiny models gain nothing from more.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def fixed_lookahead() -> Iterator[None]:
    """Where a test leaves K open it is 5: what this machine's speed would choose must not decide a
    test. tests/test_lookahead.py takes this back.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.assembly.measures_costs", lambda proposer, device: False)
        yield
