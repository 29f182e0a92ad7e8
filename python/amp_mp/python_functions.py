"""Binds the Python functions that the native library calls: csrc/torch/python/functions.h."""

from amp_mp import _C
from amp_mp.optim.state.kept_masters import refuse_lost
from amp_mp.optim.step.cuda_graphs import warn_of_graph
from amp_mp.optim.step.params import refuse_param
from amp_mp.sharding import shards
from amp_mp.sharding.gradients import local_gradient
from amp_mp.torch_private import has_sharded_modules

_C.bind_python(
    has_sharded_modules=has_sharded_modules,
    is_dtensor=shards.is_dtensor,
    like=shards.like,
    whole=shards.whole,
    part=shards.part,
    part_of_whole=shards.part_of_whole,
    is_placed_as=shards.is_placed_as,
    shards_of=shards.shards_of,
    origin_of=shards.origin_of,
    why_foreign=shards.why_foreign,
    local_gradient=local_gradient,
    refuse_param=refuse_param,
    warn_of_graph=warn_of_graph,
    refuse_lost=refuse_lost,
)
