"""How many examples a random test runs: few in `make test`, as many as AMP_MP_EXAMPLES asks for."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

ASKED = os.environ.get("AMP_MP_EXAMPLES")


def examples(few: int) -> int:
    """The number that is asked for, or a few."""
    return int(ASKED or few)


def random_runs(few: int) -> settings:
    """For a test with @given: always the same few examples, or those that are asked for, anew."""
    return settings(
        max_examples=examples(few),
        derandomize=not ASKED,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
