"""Every operator of Apex's lists in every spelling it has, as expressions to evaluate.

a, b, v, ... are float32, h, hv, ... the same in low precision; see `tensors`. An operator of the
table that is missing here, and a spelling that torch has, are noticed by test_casting_lists.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def tensors(device: str, low: torch.dtype) -> dict[str, Any]:
    """What the expressions may use."""
    torch.manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device) * 0.8 + 0.1

    size = 256  # large enough for a CPU to multiply in low precision
    wide = {
        "a": rand(size, size),
        "b": rand(size, size),
        "v": rand(size),
        "batch": rand(4, 128, 128),
        "line": rand(2, 4, 9),
        "image": rand(2, 4, 6, 6),
        "volume": rand(2, 4, 5, 5, 5),
        "k1": rand(4, 4, 3),
        "k2": rand(4, 4, 3, 3),
        "k3": rand(4, 4, 3, 3, 3),
        "time": rand(9, 2, 4),
        "kt": rand(3, 4, 4),
        "bias": rand(4),
        "three": rand(5, 3),
        "grid": rand(2, 5, 5, 2),
        "heads": rand(2, 4, 16, 32),
        "gates": rand(4 * size, size),
        "signs": torch.ones(size, device=device),
    }
    narrow = {
        "h": "a", "g": "b", "hv": "v", "hbatch": "batch", "hline": "line", "himage": "image",
        "hvolume": "volume", "hthree": "three", "hgrid": "grid", "hsigns": "signs",
    }  # fmt: skip
    target = torch.randint(0, size, (size,), device=device)
    return {
        **wide,
        **{name: wide[of].to(low) for name, of in narrow.items()},
        "target": target,
        "pixels": torch.randint(0, 4, (2, 6, 6), device=device),
        "index": target.unsqueeze(1).expand(size, size),
        "multi": torch.zeros(size, size, dtype=torch.int64, device=device),
        # On the device, as torch's ctc_loss wants them on a GPU below a dispatch mode (Computed).
        "lengths": tuple(torch.full((4,), n, device=device) for n in (4, 2)),
        "labels": torch.ones(4, 2, dtype=torch.int64, device=device),
        "hseq": torch.rand(4, 4, 8, device=device).log_softmax(-1).to(low),
        "torch": torch, "F": functional, "nn": nn, "device": device, "low": low,
    }  # fmt: skip


def rows(text: str) -> dict[str, list[str]]:
    """`name: expression | expression` a line, continued on indented lines."""
    found: dict[str, list[str]] = {}
    for line in text.replace("\n    ", " ").strip().splitlines():
        name, expressions = line.split(": ", 1)
        found[name] = [expression.strip() for expression in expressions.split(" | ")]
    return found


# Called with float32, must compute in low precision.
LOW = rows("""
linear: F.linear(a, b) | F.linear(a, b, v) | nn.Linear(256, 256).to(device)(a)
matmul: torch.matmul(a, b) | a.matmul(b) | a @ b | torch.linalg.matmul(a, b) | a.__matmul__(b)
    | a.__rmatmul__(b) | torch.matmul(batch, batch) | torch.matmul(a, g)
mm: torch.mm(a, b) | a.mm(b) | torch.mm(input=a, mat2=b)
bmm: torch.bmm(batch, batch) | batch.bmm(batch)
addmm: torch.addmm(a, a, b) | a.addmm(a, b) | torch.addmm(v, a, b, beta=0.5)
_addmm_activation: torch._addmm_activation(v, a, b)
addbmm: torch.addbmm(batch[0], batch, batch) | batch[0].addbmm(batch, batch)
baddbmm: torch.baddbmm(batch, batch, batch) | batch.baddbmm(batch, batch)
conv1d: torch.conv1d(line, k1) | F.conv1d(line, k1) | nn.Conv1d(4, 4, 3).to(device)(line)
    | F.conv1d(line, k1, padding='same')
conv2d: torch.conv2d(image, k2) | F.conv2d(image, k2, bias) | nn.Conv2d(4, 4, 3).to(device)(image)
    | F.conv2d(image, k2, padding='same') | F.conv2d(image, k2[:, :1], groups=4)
conv3d: torch.conv3d(volume, k3) | F.conv3d(volume, k3) | nn.Conv3d(4, 4, 3).to(device)(volume)
    | F.conv3d(volume, k3, padding='same')
conv_transpose1d: torch.conv_transpose1d(line, k1) | F.conv_transpose1d(line, k1)
    | nn.ConvTranspose1d(4, 4, 3).to(device)(line)
conv_transpose2d: torch.conv_transpose2d(image, k2) | F.conv_transpose2d(image, k2)
    | nn.ConvTranspose2d(4, 4, 3).to(device)(image)
conv_transpose3d: torch.conv_transpose3d(volume, k3) | F.conv_transpose3d(volume, k3)
    | nn.ConvTranspose3d(4, 4, 3).to(device)(volume)
conv_tbc: torch.conv_tbc(time, kt, bias) | F.conv_tbc(time, kt, bias)
convolution: torch.convolution(image, k2, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
_convolution: torch._convolution(image, k2, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
    False, False, True, True)
prelu: torch.prelu(a, v) | a.prelu(v) | F.prelu(a, v) | nn.PReLU().to(device)(a)
addr: torch.addr(a, v, v) | a.addr(v, v)
linalg_vecdot: torch.linalg.vecdot(a, b)
einsum: torch.einsum('ij,jk->ik', a, b) | torch.einsum('bij,bjk', batch, batch)
chain_matmul: torch.chain_matmul(a, b, a)
linalg_multi_dot: torch.linalg.multi_dot([a, b, a])
inner: torch.inner(a, b) | a.inner(b)
outer: torch.outer(v, v) | v.outer(v) | torch.ger(v, v) | v.ger(v)
scaled_dot_product_attention: F.scaled_dot_product_attention(heads, heads, heads)
    | F.scaled_dot_product_attention(heads, heads.to(low), heads, is_causal=True)
""")

# Two products, which must compute in low precision, and a formula of what they give.
CELLS = rows("""
lstm_cell: nn.LSTMCell(256, 256).to(device)(a)[0]
    | torch.lstm_cell(a, (a, a), gates, gates)[0]
gru_cell: nn.GRUCell(256, 256).to(device)(a) | torch.gru_cell(a, a, gates[:768], gates[:768])
rnn_tanh_cell: nn.RNNCell(256, 256).to(device)(a) | torch.rnn_tanh_cell(a, a, b, b)
rnn_relu_cell: nn.RNNCell(256, 256, nonlinearity='relu').to(device)(a)
    | torch.rnn_relu_cell(a, a, b, b)
""")

# Matrix and vector: low precision on CUDA, float32 on a CPU, where it is faster.
VECTOR = rows("""
mv: torch.mv(a, v) | a.mv(v) | a @ v | torch.matmul(a, v)
addmv: torch.addmv(v, a, v) | v.addmv(a, v)
""")

_POINTWISE = "acos cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan asin"
# Called with low precision, must compute in float32.
FLOAT32 = rows(
    "\n".join(f"{name}: torch.{name}(h) | h.{name}()" for name in _POINTWISE.split())
) | rows("""
pow: torch.pow(h, 2) | h.pow(2) | h ** 2 | 2 ** h | h ** g | torch.pow(2, h) | torch.pow(h, g)
    | h.__pow__(3) | h.__rpow__(3)
softplus: F.softplus(h) | nn.Softplus()(h)
renorm: torch.renorm(h, 2, 0, 1.0) | h.renorm(2, 0, 1.0)
cdist: torch.cdist(h, g)
pdist: torch.pdist(h[:4]) | F.pdist(h[:4])
dist: torch.dist(h, g) | h.dist(g)
logsumexp: torch.logsumexp(h, 1) | h.logsumexp(1) | torch.special.logsumexp(h, 1)
layer_norm: torch.layer_norm(h, (256,)) | F.layer_norm(h, (256,)) | nn.LayerNorm(256).to(device)(h)
native_layer_norm: torch.native_layer_norm(h, (256,), None, None, 1e-5)
rms_norm: torch.rms_norm(h, (256,)) | F.rms_norm(h, (256,)) | nn.RMSNorm(256).to(device)(h)
group_norm: torch.group_norm(himage, 2) | F.group_norm(himage, 2)
    | nn.GroupNorm(2, 4).to(device)(himage)
native_group_norm: torch.native_group_norm(himage, None, None, 2, 4, 36, 2, 1e-5)
cosine_similarity: torch.cosine_similarity(h, g) | F.cosine_similarity(h, g)
    | nn.CosineSimilarity()(h, g)
norm: torch._VF.norm(h) | torch._VF.norm(h, 3)
frobenius_norm: torch.frobenius_norm(h, [0, 1])
nuclear_norm: torch.nuclear_norm(h[:8, :8]) | torch.norm(h[:8, :8], p='nuc')
linalg_norm: torch.linalg.norm(h) | torch.linalg.norm(h, ord=1) | torch.linalg.norm(h, dim=1)
linalg_matrix_norm: torch.linalg.matrix_norm(h) | torch.linalg.matrix_norm(h[:8, :8], ord='nuc')
std: torch.std(h) | h.std() | h.std(1)
var: torch.var(h) | h.var() | h.var(1)
std_mean: torch.std_mean(h)
var_mean: torch.var_mean(h)
cross_entropy_loss: F.cross_entropy(h, target) | nn.CrossEntropyLoss()(h, target)
nll_loss: F.nll_loss(h, target) | nn.NLLLoss()(h, target)
nll_loss_nd: torch._C._nn.nll_loss_nd(h, target)
nll_loss2d: F.nll_loss(himage, pixels) | torch._C._nn.nll_loss2d(himage, pixels)
l1_loss: F.l1_loss(h, g) | nn.L1Loss()(h, g)
mse_loss: F.mse_loss(h, g) | nn.MSELoss()(h, g)
smooth_l1_loss: F.smooth_l1_loss(h, g) | nn.SmoothL1Loss()(h, g)
huber_loss: F.huber_loss(h, g) | nn.HuberLoss()(h, g)
kl_div: torch.kl_div(h, g) | F.kl_div(h, g, reduction='sum') | nn.KLDivLoss(reduction='sum')(h, g)
poisson_nll_loss: torch.poisson_nll_loss(h, g, True, False, 1e-8, 1) | F.poisson_nll_loss(h, g)
    | nn.PoissonNLLLoss()(h, g)
cosine_embedding_loss: torch.cosine_embedding_loss(h, g, signs)
    | F.cosine_embedding_loss(h, g, hsigns)
    | nn.CosineEmbeddingLoss()(h, g, hsigns)
hinge_embedding_loss: torch.hinge_embedding_loss(h, hsigns) | F.hinge_embedding_loss(h, hsigns)
    | nn.HingeEmbeddingLoss()(h, hsigns)
margin_ranking_loss: torch.margin_ranking_loss(hv, hv, hsigns)
    | F.margin_ranking_loss(hv, hv, hsigns)
    | nn.MarginRankingLoss()(hv, hv, hsigns)
multilabel_margin_loss: F.multilabel_margin_loss(h, multi) | nn.MultiLabelMarginLoss()(h, multi)
multi_margin_loss: F.multi_margin_loss(h, target) | nn.MultiMarginLoss()(h, target)
soft_margin_loss: F.soft_margin_loss(h, g) | nn.SoftMarginLoss()(h, g)
triplet_margin_loss: torch.triplet_margin_loss(h, g, h) | F.triplet_margin_loss(h, g, h)
    | nn.TripletMarginLoss()(h, g, h)
binary_cross_entropy_with_logits: torch.binary_cross_entropy_with_logits(h, g)
    | F.binary_cross_entropy_with_logits(h, g) | nn.BCEWithLogitsLoss()(h, g)
ctc_loss: F.ctc_loss(hseq, labels, *lengths) | nn.CTCLoss()(hseq, labels, *lengths)
    | torch.ctc_loss(hseq, labels, *lengths)
grid_sampler: torch.grid_sampler(himage, hgrid, 0, 0, False)
    | F.grid_sample(himage, hgrid, align_corners=False)
upsample_nearest1d: F.interpolate(hline, scale_factor=2) | nn.Upsample(scale_factor=2)(hline)
upsample_nearest2d: F.interpolate(himage, scale_factor=2) | F.upsample_nearest(himage, (9, 9))
upsample_nearest3d: F.interpolate(hvolume, scale_factor=2)
_upsample_nearest_exact1d: F.interpolate(hline, scale_factor=2, mode='nearest-exact')
_upsample_nearest_exact2d: F.interpolate(himage, scale_factor=2, mode='nearest-exact')
_upsample_nearest_exact3d: F.interpolate(hvolume, scale_factor=2, mode='nearest-exact')
upsample_linear1d: F.interpolate(hline, scale_factor=2, mode='linear')
upsample_bilinear2d: F.interpolate(himage, scale_factor=2, mode='bilinear')
_upsample_bilinear2d_aa: F.interpolate(himage, scale_factor=0.5, mode='bilinear', antialias=True)
upsample_trilinear3d: F.interpolate(hvolume, scale_factor=2, mode='trilinear')
upsample_bicubic2d: F.interpolate(himage, scale_factor=2, mode='bicubic')
_upsample_bicubic2d_aa: F.interpolate(himage, scale_factor=0.5, mode='bicubic', antialias=True)
""")

# Called with low precision, must give float32 without rounding in between.
WIDE_OUTPUT = rows("""
softmax: torch.softmax(h, -1) | h.softmax(-1) | F.softmax(h, -1) | nn.Softmax(-1)(h)
    | F.softmin(h, -1) | torch.special.softmax(h, -1)
log_softmax: torch.log_softmax(h, -1) | h.log_softmax(-1) | F.log_softmax(h, -1)
    | nn.LogSoftmax(-1)(h) | torch.special.log_softmax(h, -1)
sum: torch.sum(h) | h.sum() | h.sum(1) | torch.sum(h, dim=0, keepdim=True)
mean: torch.mean(h) | h.mean() | h.mean(1)
prod: torch.prod(h) | h.prod() | h.prod(1)
cumsum: torch.cumsum(h, 0) | h.cumsum(0)
cumprod: torch.cumprod(h, 0) | h.cumprod(0)
linalg_vector_norm: torch.linalg.vector_norm(h) | F.normalize(h)
    | torch.norm(h) | h.norm() | torch.norm(h, p=1, dim=1) | h.norm(dim=0) | torch.norm(h, p=3)
""")

# Called with both, must compute in float32.
WIDEST = rows("""
addcdiv: torch.addcdiv(h, a, b) | h.addcdiv(a, g)
addcmul: torch.addcmul(a, h, g) | a.addcmul(h, b)
cross: torch.cross(three, hthree, dim=1) | three.cross(hthree, dim=1)
linalg_cross: torch.linalg.cross(three, hthree)
bilinear: torch.bilinear(a[:, :4], h[:, :4], k1[:, :, 0].expand(4, 4, 4))
    | F.bilinear(a[:, :4], h[:, :4], k1[:, :, 0].expand(4, 4, 4))
    | nn.Bilinear(4, 4, 2).to(device)(a[:, :4], h[:, :4])
dot: torch.dot(v, hv) | v.dot(hv)
vdot: torch.vdot(hv, v) | v.vdot(hv)
tensordot: torch.tensordot(a, h, 1)
index_put: torch.index_put(a, (target,), h) | a.index_put((target,), h)
scatter_add: torch.scatter_add(a, 0, index, h) | a.scatter_add(0, index, h)
cat: torch.cat([a, h]) | torch.concat([h, a]) | torch.concatenate([a, h])
    | torch.cat(tensors=[a, h]) | torch.hstack([a, h]) | torch.vstack([a, h])
    | torch.dstack([a, h]) | torch.column_stack([a, h])
stack: torch.stack([a, h]) | torch.stack((h, a), dim=1)
lerp: torch.lerp(a, h, 0.5) | a.lerp(h, 0.5) | torch.lerp(h, a, b)
index_copy: torch.index_copy(a, 0, target, h) | a.index_copy(0, target, h)
""")

BANNED = rows("""
binary_cross_entropy: F.binary_cross_entropy(h, g) | nn.BCELoss()(h, g)
    | torch._C._nn.binary_cross_entropy(h, g)
""")

ALL = LOW | CELLS | VECTOR | FLOAT32 | WIDE_OUTPUT | WIDEST | BANNED
