"""Parts of Apex's tree that are not here, and what to use instead.

A script for Apex that runs unchanged stops here first, and its author knows only Apex's names.
"""

import sys
from types import ModuleType
from typing import Any

ATTENTION = "its CUDA kernels are not there: use torch's scaled_dot_product_attention"
PLAIN = "its CUDA kernels are not there: use the layers of torch.nn under torch.compile"
SHARDED = "use torch's fully_shard with the optimizers of amp_mp.optim (docs/distributed.md)"
PATCHES = "nothing is patched here; use amp_mp.set_policy, and amp_mp.policies to see casts"
KERNELS = (
    "bottleneck conv_bias_relu cudnn_gbn focal_loss group_norm groupbn index_mul_2d nccl_allocator "
    "peer_memory transducer"
)
MISSING = {
    **{f"amp.{n}": PATCHES for n in ("compat", "lists", "rnn_compat", "utils", "wrap")},
    "amp.NoOpHandle": "use apex.amp.init, which returns it",
    **{f"amp.{n}": "use init().wrap_optimizer" for n in ("opt", "OptimWrapper")},
    "RNN": "use torch.nn.LSTM and its relatives",
    "reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "transformer": "use torch.distributed.tensor.parallel, or Megatron-Core without Apex",
    **dict.fromkeys(("mlp", "fused_dense"), PLAIN),
    **{f"contrib.{name}": ATTENTION for name in ("fmha", "multihead_attn", "openfold_triton")},
    **{f"contrib.{name}": PLAIN for name in KERNELS.split()},
    "parallel.create_syncbn_process_group": "use torch.distributed.new_subgroups",
    "contrib.layer_norm": "use amp_mp.apex.normalization.FusedLayerNorm",
    "contrib.optimizers": SHARDED + "; FP16_Optimizer is in amp_mp.apex.fp16_utils",
    "contrib.sparsity": "use torch.ao.pruning or torch.sparse.semi_structured",
    "contrib.torchsched": "use torch.compile",
    "contrib.gpu_direct_storage": "use torch.cuda.gds",
}


def explain_missing(package: ModuleType) -> None:
    """Has AttributeErrors of a package, or imports from it, say why a name of Apex is not there."""

    def refuse(name: str) -> Any:
        reason = MISSING.get(f"{package.__name__}.{name}".removeprefix("amp_mp.apex."))
        hint = f": {reason}" if reason else ""
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}{hint}")

    vars(package)["__getattr__"] = refuse
    vars(package).setdefault("__path__", [])  # Python then asks Finder for what is below a module


class Finder:
    """Has an import of what is missing raise ModuleNotFoundError with the reason."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Called where Python has found no module of this name."""
        root, own = name.removeprefix("amp_mp."), __name__.rpartition(".")[0]
        reason = MISSING.get(root.removeprefix("apex."))
        registered = getattr(sys.modules.get("apex"), "__name__", None) == own
        if reason and name.startswith(f"{own}." if root != name or not registered else "apex."):
            raise ModuleNotFoundError(f"{name} is not there: {reason}")


sys.meta_path.append(Finder)
