"""Every name of Apex's lists is on the table, or in tests/features.md with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import amp_mp as amp

LOW = torch.bfloat16
PAGE = Path(__file__).resolve().parents[1] / "features.md"

# As in apex/amp/lists of 2018 to 2025.
LISTS = {
    "functional, fp16": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
        conv_tbc linear""",
    "functional, fp32": """interpolate grid_sample softplus softmin log_softmax softmax gelu
        layer_norm group_norm local_response_norm normalize cosine_similarity poisson_nll_loss
        cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss
        margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss
        nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss
        triplet_margin_loss ctc_loss""",
    "functional, banned": "binary_cross_entropy",
    "torch, fp16": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
        conv_tbc prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm""",
    "torch, fp32": """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow
        cumprod cumsum dist mean norm prod std sum var renorm""",
    "torch, promoted": """addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt
        ne cat stack""",
    "Tensor": """matmul ipow pow rpow cpu add div eq ge gt iadd idiv imul isub itruediv le lt mul ne
        radd rdiv rmul rsub rtruediv sub truediv""",
    "recurrent": """rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell rnn_relu rnn_tanh gru lstm""",
}
# The operators under the names that are not the operators' own.
OPERATORS = {
    "interpolate": "upsample_bilinear2d", "grid_sample": "grid_sampler", "softmin": "softmax",
    "normalize": "linalg_vector_norm", "cross_entropy": "cross_entropy_loss", "ipow": "pow_",
    "rpow": "pow",
}  # fmt: skip
NAMES = sorted({name for names in LISTS.values() for name in names.split()})


def left_out() -> set[str]:
    section = PAGE.read_text().split("### Names of Apex's lists that are left out")[1]
    rows = re.findall(r"^\| (.+) \| .+ \|$", section.split("\n## ")[0], re.MULTILINE)
    return {name.strip("_") for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_name_of_apexs_lists_is_on_the_table_or_documented(apex: str) -> None:
    table = {op.split("::")[1].split(".")[0] for op in amp.policies(apex)}
    on_the_table = {name for name in NAMES if OPERATORS.get(name, name) in table}
    if apex == "cuda":  # torch's own autocast casts what cuDNN's recurrent layers get
        on_the_table |= {"rnn_relu", "rnn_tanh", "gru", "lstm"}
    assert set(NAMES) - on_the_table == left_out()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "atan2"])
def test_arithmetic_is_promoted_by_torch(apex: str, name: str) -> None:
    a = torch.rand(4, device=apex)
    operator: Any = getattr(torch, name)
    assert operator(a, a.to(LOW)).dtype == operator(a.to(LOW), a).dtype == torch.float32
    assert torch.equal(operator(a, a.to(LOW)), operator(a, a.to(LOW).float()))


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_are_made_in_float32(apex: str, name: str) -> None:
    a = torch.rand(64, device=apex)
    compare: Any = getattr(torch, name)
    assert torch.equal(compare(a, a.to(LOW)), compare(a, a.to(LOW).float()))


def test_what_the_page_says_of_the_others(apex: str) -> None:
    x = torch.rand(2, 4, 4, device=apex)
    h = x.to(LOW)
    assert h.cpu().dtype == LOW
    assert functional.gelu(h).dtype == LOW
    assert functional.local_response_norm(h, 2).dtype == torch.float32
    assert functional.multilabel_soft_margin_loss(h[0], x[0].round()).dtype == torch.float32
