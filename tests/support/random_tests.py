"""How many examples a random test runs: few in `make test`, as many as AMP_MP_EXAMPLES asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, seed, settings

Test = TypeVar("Test", bound=Callable[..., None])
ASKED = os.environ.get("AMP_MP_EXAMPLES")
SEED = 1


def examples(few: int) -> int:
    """The number that is asked for, or a few."""
    return int(ASKED or few)


def random_runs(few: int) -> Callable[[Test], Test]:
    """For a test with @given: always the same few examples, or those that are asked for, anew."""

    def with_settings(test: Test) -> Test:
        quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}
        if ASKED:
            return settings(max_examples=examples(few), **quiet)(test)
        # derandomize=True would draw others whenever the text of the test changes.
        return seed(SEED)(settings(max_examples=few, database=None, **quiet)(test))

    return with_settings
