"""Runs tests on other processors of x86-64 under qemu, and compares them with this machine.

    .venv/bin/python build_tools/test_processors.py    # make test-processors

Needs Debian's package qemu-user. On each processor tests/support/digest.py has to print the same
digests as here, then README's example and TESTS run. torch, its libraries and amp_mp choose their
instructions by CPUID, which qemu answers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from build_tools.test_aarch64 import run_emulated, write_start  # noqa: E402
from build_tools.test_wheel import ABOUT, run  # noqa: E402

# What amp_mp and torch have to choose there. Nehalem has no AVX.
PROCESSORS = {
    "Nehalem": ("baseline", "DEFAULT"),
    "Haswell": ("avx2", "AVX2"),
    "EPYC-Milan": ("avx2", "AVX2"),
}
CHECK = "; found = amp_mp.build_info()['cpu'], torch.backends.cpu.get_cpu_capability()"

# Those that depend on instructions, without what takes a minute and more under emulation: large
# products, and processes that tests start. Two things are other than on a processor: with
# subnormals flushed, qemu's F16C takes those of float16 for 0; and torch's own LSTM in float32,
# which oneDNN compiles for AVX2, is .3 off float64's (`inference` runs one too).
TESTS = (
    "tests/formats",
    "tests/optim/step/test_rules.py",
    "tests/optim/step/test_measure.py",
    "tests/casting/test_casting_lists.py",
    "tests/casting/test_products.py",
    "tests/casting/test_layer_norms.py",
    "tests/wrappers/test_larc.py",
    "-k",
    "not flushed and not lstm-False and not inference and not 3000 and not 9000 "
    "and not 700-600-500 and not conv2d and not test_attention and not torchs_autocast "
    "and not overrides_the_argument and not compile_and_checkpoint",
)


def main() -> None:
    """What the text above says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="2", help="processes for the tests; default: %(default)s")
    parser.add_argument("--processors", nargs="+", default=PROCESSORS, choices=PROCESSORS)
    parser.add_argument("tests", nargs="*", default=TESTS, help="default: what the text above says")
    arguments = parser.parse_args()
    emulator = shutil.which("qemu-x86_64")
    if not emulator:
        raise SystemExit("On Debian or Ubuntu, qemu-x86_64 is missing: apt install qemu-user")
    for name in arguments.processors:
        # Beside this Python, so that it has the same packages. Without check=off qemu warns of what
        # it cannot emulate.
        python = Path(sys.executable).with_name(f"python-{name}")
        write_start(python, [emulator, "-cpu", f"{name},check=off"], sys.executable)
        run(python, "-c", f"{ABOUT}{CHECK}; assert found == {PROCESSORS[name]}, found")
        run_emulated(python, arguments.tests, arguments.jobs)


if __name__ == "__main__":
    main()
