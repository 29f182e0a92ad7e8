"""Weights as float8 for samplers: a whole model's, one tensor's, and back."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from amp_mp import _C
from amp_mp.dtypes import LOW_PRECISION, NATIVE, check_choice, check_dtype
from amp_mp.module_names import plain_name, plain_names
from amp_mp.sharding.shards import is_dtensor, local_of, split_groups, why_without_memory
from amp_mp.torch_private import ConvNd, local_shape_and_offset, outside_graphs

Form = Literal["float8_128x128", "float8_128x128_power", "mxfp8"]
BLOCK, GROUP = 128, 32  # rows and columns of a block; columns of one of MXFP8
FLOAT32_BITS = 23  # of the significand, below the exponent, which an E8M0 byte is


class Float8(NamedTuple):
    """A weight as float8; a code times the scale of its block is the weight, rounded.

    codes: float8_e4m3fn, contiguous, of the weight's shape; of a sharded one this process's part.

    scales: of each block of the last two dimensions [out, in], with the weight's dimensions before
    these. "float8_128x128": float32 [ceil(out/128), ceil(in/128)]. "float8_128x128_power": powers
    of two, as uint8: the exponent plus 127 (E8M0). "mxfp8": such bytes, [out, in/32]. Of a sharded
    weight the first two have those of the whole weight, the same on every process; "mxfp8" has
    those of this process's part, which are cut as the codes are.
    """

    codes: Tensor
    scales: Tensor


@outside_graphs
def float8_of(weight: Tensor, form: Form) -> Float8:
    """One weight as float8: float16, bfloat16 or float32 [..., out, in], which it does not round.

    form: "float8_128x128" has a float32 scale for each 128 x 128 block, "float8_128x128_power" a
    power of two, "mxfp8" a power of two for 32 weights of a row. Blocks at the edges are smaller.

    A scale is the largest finite magnitude of its block / 448 in float32, at least 2^-126; or the
    power of two from there up. A code is weight / scale to nearest even, saturating at 448. NaN and
    inf become NaN with their sign, and -0 stays -0. CPU and CUDA give the same bits. The result
    is on the weight's device and requires no gradient.

    TypeError for what is no tensor, for other dtypes and for a DTensor, of which `float8_weights`
    makes float8; ValueError for another form, for fewer than two dimensions, for "mxfp8" with rows
    of no multiple of 32.
    """
    check_choice("form", form, get_args(Form))
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor, found a {type(weight).__name__}")
    if is_dtensor(weight):
        raise TypeError(
            "weight is a DTensor, whose blocks other processes may have parts of; "
            "float8_weights(model, form) takes sharded models"
        )
    if weight.dtype not in NATIVE:
        raise TypeError(f"weight must be float16, bfloat16 or float32, found {weight.dtype}")
    if weight.dim() < 2:
        raise ValueError(f"weight must be [..., out, in], found the shape {tuple(weight.shape)}")
    if form == "mxfp8" and weight.shape[-1] % GROUP:
        raise ValueError(f"weight {_has_odd_rows(weight)}")
    return _encoded(weight.detach(), form)


def float32_of_float8(value: Float8, form: Form) -> Tensor:
    """What the codes stand for: code times scale, rounded once to float32, of the codes' shape.

    With powers of two nothing is rounded. value: codes and scales of a whole weight. NaN codes are
    NaN.

    ValueError for another form, for codes of another dtype than float8_e4m3fn, and for scales of
    another shape or dtype than the form has for these codes.
    """
    check_choice("form", form, get_args(Form))
    codes, scales = value
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes must be torch.float8_e4m3fn, found {codes.dtype}")
    dtype = torch.float32 if form == "float8_128x128" else torch.uint8
    *matrices, out, width = codes.shape
    if form == "mxfp8":
        shape = (*matrices, out, width // GROUP)
    else:
        shape = (*matrices, -(-out // BLOCK), -(-width // BLOCK))
    if scales.dtype != dtype or scales.shape != shape:
        raise ValueError(
            f"scales must be {dtype} {list(shape)} for {form} codes of shape {list(codes.shape)}, "
            f"found {scales.dtype} {list(scales.shape)}"
        )
    if dtype == torch.uint8:
        scales = (scales.int() << FLOAT32_BITS).view(torch.float32)
    if form != "mxfp8":
        scales = scales.repeat_interleave(BLOCK, -2)[..., :out, :]
    block = GROUP if form == "mxfp8" else BLOCK
    return codes.float() * scales.repeat_interleave(block, -1)[..., :width]


@torch.no_grad()
def float8_weights(
    model: nn.Module,
    form: Form,
    *,
    keep: Iterable[str] | Callable[[str, Tensor], bool] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[str, Float8 | Tensor]]:
    """A model's weights as float8, one after the other, so that there is no second copy of all.

        for name, weight in amp.float8_weights(model, "float8_128x128", keep=["lm_head"]):
            send(name, weight)  # Float8(codes, scales), or a tensor that was left as it is

    Names are those of the plain model's state_dict(), in its order, tied weights under each of
    theirs. Values are of the weights as they are, not of their masters; float32 ones are rounded to
    `dtype` first, as by Tensor.to. See `float8_of` for the forms and the rule.

    Left as they are, float32 ones in `dtype`, all others the model's own memory: what has fewer
    than two dimensions or another dtype than float32, float16 and bfloat16; embeddings, also where
    they are tied to another layer; convolutions; buffers; and what `keep` names.

    **Sharded models**: each process gets its part of every tensor, and of "float8_128x128" and
    "float8_128x128_power" the scales of the whole weight. For these two forms all processes that
    hold parts have to call it: the call itself, not the iteration, has one all-reduce of 4 bytes a
    block for all weights that are cut over the same processes.

    Args:
        model: sharded by FSDP2 or tensor parallelism, or not.
        form: "float8_128x128", "float8_128x128_power" or "mxfp8".
        keep: whole components of names, "lm_head" or "mlp.gate", which is not "mlp.gate_up_proj";
            or a function of the name and the parameter that says whether it is left. Default none.
        dtype: torch.bfloat16 (default) or torch.float16, of what is float32.

    Raises, before anything is sent: TypeError for what is no module; ValueError for another form
    or dtype, a name in `keep` that fits nothing, a weight on the meta device or with a placement
    that cannot be served (Partial, others than Shard and Replicate that leave gaps), and for
    "mxfp8" a weight whose rows, or this process's part of them, are no multiple of 32;
    RuntimeError inside of AveragedModel.swap. RuntimeError while it iterates, if a weight was
    written since the call.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {model!r}")
    check_choice("form", form, get_args(Form))
    check_dtype(dtype, LOW_PRECISION)
    params = list(model.parameters())
    _C.refuse_borrowed(params, "float8_weights()", reads=True)
    _C.round_written_masters(params)
    names = plain_names(model)
    found = {
        plain_name(names, name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    left = _left_as_they_are(model) | _kept(found, keep)
    weights = {
        name: value
        for name, value in found.items()
        if id(value) not in left and value.dim() > 1 and value.dtype in NATIVE
    }
    for name, weight in weights.items():
        if why := _why_not(weight, form):
            raise ValueError(f"{name} {why}")
    stamps = {  # tensors of inference mode count no writes
        name: _C.Stamp(local)
        for name, value in found.items()
        if not (local := local_of(value)).is_inference()
    }
    scales = {} if form == "mxfp8" else _scales_of_shards(weights, form, dtype)

    def each() -> Iterator[tuple[str, Float8 | Tensor]]:
        for name, value in found.items():
            local = local_of(value).detach()
            if name in stamps and not stamps[name].still(local_of(value)):
                raise RuntimeError(
                    f"{name} was written since float8_weights was called, so its codes would not "
                    "go with the others; take all of them before the next step"
                )
            if local.dtype == torch.float32:
                local = local.to(dtype)
            if name not in weights:
                yield name, local
            elif id(value) not in scales:
                yield name, _encoded(local, form)
            elif local.numel() == 0:
                yield name, Float8(local.to(torch.float8_e4m3fn), scales[id(value)])
            else:
                shard, whole = _Shard.of(value), scales[id(value)]
                own = whole[shard.blocks].contiguous()
                yield name, Float8(_encoded(local, form, own, shard.first).codes, whole)

    return each()


def _encoded(
    weight: Tensor, form: Form, scales: Tensor | None = None, first: tuple[int, int] = (0, 0)
) -> Float8:
    is_mx = form == "mxfp8"
    is_power = is_mx or form == "float8_128x128_power"
    return Float8(*_C.float8_encode(weight.contiguous(), is_power, is_mx, scales, *first))


def _left_as_they_are(model: nn.Module) -> set[int]:
    """By id: weights of embeddings and convolutions, and buffers."""
    found = {id(buffer) for buffer in model.buffers()}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | ConvNd):
            found.add(id(module.weight))
    return found


def _kept(
    found: dict[str, Tensor], keep: Iterable[str] | Callable[[str, Tensor], bool]
) -> set[int]:
    """By id: what the argument names."""
    if callable(keep):
        return {id(value) for name, value in found.items() if keep(name, value)}
    kept = set()
    for wanted in [keep] if isinstance(keep, str) else keep:
        fitting = {id(v) for name, v in found.items() if f".{wanted}." in f".{name}."}
        if not fitting:
            raise ValueError(
                f"keep: {wanted!r} is no name, or whole components of one, of the model's "
                f"parameters, such as {next(iter(found), '(none)')!r}"
            )
        kept |= fitting
    return kept


def _has_odd_rows(weight: Tensor) -> str:
    return (
        f"has rows of {weight.shape[-1]} weights, and mxfp8 needs a multiple of {GROUP}; leave it "
        "as it is, or choose another form"
    )


def _why_not(weight: Tensor, form: Form) -> str:
    """Why there is no float8 of a weight, in words; empty if there is."""
    local = local_of(weight)
    if local.is_meta:
        return "is on the meta device and has no weights yet"
    if why := why_without_memory(weight):
        return why
    if form == "mxfp8" and weight.shape[-1] % GROUP:
        return f"{_has_odd_rows(weight)}: keep=[...]"
    if not is_dtensor(weight):
        return ""
    if why := _why_without_place(weight):
        return why
    if form == "mxfp8" and local.shape[-1] % GROUP:
        return f"is cut along its rows, and this process's part {_has_odd_rows(local)}"
    return ""


def _why_without_place(weight: Any) -> str:
    """Why nobody knows which rows and columns this process has; empty if they are one piece."""
    cuts = [
        (placement, getattr(placement, "dim", None), size)
        for placement, size in zip(weight.placements, weight.device_mesh.shape, strict=True)
        if not placement.is_replicate()
    ]
    for at, (placement, dim, _) in enumerate(cuts):
        # _StridedShard: the mesh dimensions behind it have cut the same dimension before it.
        inner = prod(size for _, other, size in cuts[at + 1 :] if other == dim)
        if dim is None or getattr(placement, "split_factor", inner) != inner:
            return f"has the placement {placement}, and float8 needs shards of one piece"
    if local_shape_and_offset(weight.shape, weight)[0] != tuple(local_of(weight).shape):
        return f"has a shard of another size than its placements {weight.placements} give it"
    return ""


class _Shard(NamedTuple):
    """Which blocks of the whole weight a process has parts of."""

    blocks: tuple[slice, ...]
    first: tuple[int, int]  # row and column of its first weight in the first of them

    @classmethod
    def of(cls, weight: Tensor) -> "_Shard":
        shape, offset = local_shape_and_offset(weight.shape, weight)
        ends = [start + size for start, size in zip(offset, shape, strict=True)]
        matrices = [slice(*each) for each in zip(offset[:-2], ends[:-2], strict=True)]
        inner = zip(offset[-2:], ends[-2:], strict=True)
        blocks = [slice(start // BLOCK, -(-end // BLOCK)) for start, end in inner]
        return cls((*matrices, *blocks), (offset[-2] % BLOCK, offset[-1] % BLOCK))


def _scales_of_shards(
    weights: dict[str, Tensor], form: Form, dtype: torch.dtype
) -> dict[int, Tensor]:
    """By id: the scales of the whole of each weight that is cut over processes."""
    cut = {id(weight): weight for weight in weights.values() if split_groups(weight)}
    largest: dict[int, Tensor] = {}
    for key, weight in cut.items():
        local, shard = local_of(weight).detach(), _Shard.of(weight)
        *matrices, out, width = weight.shape
        whole = (*matrices, -(-out // BLOCK), -(-width // BLOCK))
        largest[key] = torch.zeros(whole, device=local.device)
        if local.numel():
            local = local.to(dtype) if local.dtype == torch.float32 else local
            largest[key][shard.blocks] = _C.float8_amax(local.contiguous(), *shard.first)
    groups: dict[Any, list[int]] = {}
    for key, weight in cut.items():
        for group in split_groups(weight):
            groups.setdefault(group, []).append(key)
    for group, keys in groups.items():
        _take_largest(group, [largest[key] for key in keys], cut[keys[0]])
    power = form == "float8_128x128_power"
    return {key: _C.float8_scales(each, power) for key, each in largest.items()}


def _take_largest(group: Any, tensors: list[Tensor], weight: Any) -> None:
    """Each number becomes the largest that a process of the group has, in one all-reduce."""
    import torch.distributed as dist

    device = weight.device_mesh.device_type  # weights may be offloaded to the host
    joined = torch.cat([each.flatten().to(device) for each in tensors])
    dist.all_reduce(joined, dist.ReduceOp.MAX, group)
    first = 0
    for each in tensors:
        each.copy_(joined[first : first + each.numel()].view_as(each))
        first += each.numel()
