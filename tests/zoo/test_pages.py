"""The blocks of the documentation that need packages which `make test` does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import packages_of, ranks_of

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = [page for page in WRITTEN if packages_of(page.read_text())]
SCRIPT = """
import os, pathlib, sys
import torch.distributed as dist
import torchvision_ops
torchvision_ops.install()
import pages
pages.run_page(pathlib.Path({page!r}), pathlib.Path({folder!r}), everything=True)
if dist.is_initialized():  # gloo's threads abort some processes that end tidily
    dist.barrier()
    os._exit(0)
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_in_order_as_printed(page: Path, tmp_path: Path, run_on: Any) -> None:
    run_on(ranks_of(page.read_text()), SCRIPT.format(page=str(page), folder=str(tmp_path)))
