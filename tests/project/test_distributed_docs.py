"""The pages on memory and several processes: tables are what is counted, commands run.

tests/project/test_docs.py runs their Python.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_memory
from pages import blocks
from ranks import LARGE
from tiers import full

ROOT = Path(__file__).resolve().parents[2]
DETAILS = (ROOT / "docs/distributed.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", DETAILS, re.DOTALL)


def test_the_tables_have_rows_that_the_example_prints() -> None:
    head = sharded_memory.table().splitlines()[0]
    tables = re.findall(rf"^{re.escape(head)}\n.*\n((?:\|.*\n)+)", DETAILS, re.M)
    for replicas, rows in zip((1, 8), tables, strict=True):
        printed = sharded_memory.table(replicas=replicas).splitlines()
        assert set(rows.splitlines()) <= set(printed[2:])


def test_the_table_of_a_7_b_model_is_what_its_block_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/memory.md").read_text()
    exec(blocks(page)[0], {})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 10
    assert printed in page


# Starting torchrun takes seconds, so `make test` runs one of its commands.
SOME = [block for block in COMMANDS if "torchrun" not in block or "--memory tiny" in block]
BLOCKS = COMMANDS if LARGE else [full(b) if "torchrun" in b else b for b in SOME]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_the_commands_of_the_page_run(block: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        launch = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[
            program
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, *launch, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert "validation loss" in done.stdout or "| 405 B |" in done.stdout
