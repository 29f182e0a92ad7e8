"""torch's own table of casts, and reductions into low precision: as torch without amp_mp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import casting_lists as lists
import pytest
import torch
from casts import computed, spellings

import amp_mp as amp
from amp_mp import _C

LOW = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:(?!amp_mp)")  # some spellings are deprecated


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def names(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the expressions use, on each device."""
    return lists.tensors(request.param, LOW)


def outcome(expression: str, names: dict[str, Any]) -> Any:
    """The dtypes that an expression computes in, or the kind of its error."""
    try:
        found = computed(expression, names)
    except (RuntimeError, NotImplementedError) as error:
        return type(error)
    return found.taken, found.given


@pytest.fixture(scope="module")
def of_torch(names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What torch alone makes of every expression; then amp_mp's table of torch is in force."""
    with torch.autocast(names["device"], LOW):
        found = {e: outcome(e, names) for e in spellings(lists.ALL)}
    with amp.autocast(names["device"], LOW):  # which puts it in force until it is taken away
        assert amp.policies(names["device"])["aten::mm"] == "low_precision"
    yield found
    amp.casting.uninstall()


def test_the_torch_table_is_torchs_own(names: dict[str, Any], of_torch: dict[str, Any]) -> None:
    """The same dtypes, or the same kind of error, as without amp_mp."""
    with amp.autocast(names["device"], LOW):
        assert amp.policies(names["device"])["aten::mm"] == "low_precision"
        found = {expression: outcome(expression, names) for expression in of_torch}
    assert len(found) > 250
    assert {e: (own, of_torch[e]) for e, own in found.items() if own != of_torch[e]} == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_torch_table_names_what_torch_itself_casts(device: str) -> None:
    """Needs no GPU: torch for CPUs has the casts for CUDA, too."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    amp.casting.uninstall()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for _, each in _C.casting.op_list(f"torch {device}") for name in each]
    known = [name for name in names if torch._C._dispatch_has_kernel(name)]
    assert len(known) > 15
    assert [name for name in known if not has_kernel(name, key)] == []


REDUCTIONS = {
    "sum": lambda x, **more: torch.sum(x, 0, **more),
    "mean": lambda x, **more: torch.mean(x, 0, **more),
    "prod": lambda x, **more: torch.prod(x, 0, **more),
    "cumsum": lambda x, **more: torch.cumsum(x, 0, **more),
    "cumprod": lambda x, **more: torch.cumprod(x, 0, **more),
    "softmax": lambda x, **more: torch.softmax(x, 0, **more),
    "log_softmax": lambda x, **more: torch.log_softmax(x, 0, **more),
    "vector_norm": lambda x, **more: torch.linalg.vector_norm(x, dim=0, **more),
    "norm": lambda x, **more: torch.norm(x, 2, 0, **more),
    "logsumexp": lambda x, **more: torch.logsumexp(x, 0, **more),
    "std": lambda x, **more: torch.std(x, 0, **more),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_into_low_precision_give_what_torch_gives(
    names: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    x = names["v"].view(16, 16).to(dtype)
    wanted = REDUCTIONS[name](x, out=torch.empty(0, device=x.device, dtype=dtype))
    with amp.init(device_type=names["device"], dtype=dtype, loss_scale=1.0):
        out = torch.empty(0, device=x.device, dtype=dtype)
        assert REDUCTIONS[name](x, out=out) is out
        assert torch.equal(out, wanted)
        if name not in ("norm", "logsumexp", "std"):  # into what is written, from float32 as well
            torch.testing.assert_close(
                REDUCTIONS[name](x.float(), out=out), wanted, rtol=2.0**-6, atol=0
            )
