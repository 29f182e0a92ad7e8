"""For the tests of Apex's tree: no level of an earlier test is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from apex_levels import forget


@pytest.fixture(autouse=True)
def no_level() -> Iterator[None]:
    """Ends what a test has initialised."""
    forget()
    yield
    forget()
