"""Runs every test of the pretend GPU with delayed streams, once for each of several seeds.

    python tests/emulators/random_orders.py --seeds 20 --first 2

A seed gives the order in which kernels run. Odd seeds run everything on a stream beside the default
one. An order takes three to five minutes. A line is printed for each, and the end of pytest's
output where tests fail. `make test-streams` calls it.
"""

from __future__ import annotations

import argparse
import sys
import time

from pretend_gpu.build import build
from pretend_gpu.suite import FILES, SuiteFailedError, pass_in_numbers

LIMIT = 3600.0  # seconds an order may take


def run(seed: int) -> bool:
    """Runs one order and prints its line; whether everything passed."""
    side = seed % 2
    where = "on a side stream" if side else "on the default stream"
    begun = time.monotonic()
    try:
        count = pass_in_numbers(
            list(FILES),
            timeout=LIMIT,
            AMP_MP_DELAYED_STREAMS=str(seed),
            AMP_MP_SIDE_STREAM=str(side),
        )
    except SuiteFailedError as error:
        print(f"seed {seed} {where}: FAILED\n{error}", flush=True)
        return False
    seconds = time.monotonic() - begun
    print(f"seed {seed} {where}: {count} passed in {seconds:.0f} s", flush=True)
    return True


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many orders")
    parser.add_argument("--first", type=int, default=2, help="the first seed")
    given = parser.parse_args()
    build()
    failed = [s for s in range(given.first, given.first + given.seeds) if not run(s)]
    print(f"{given.seeds - len(failed)} of {given.seeds} orders passed")
    if failed:
        sys.exit(f"failed: seeds {failed}")


if __name__ == "__main__":
    main()
