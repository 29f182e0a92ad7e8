"""What scripts for Apex use: amp.init with its handle, FP16_Optimizer and fp16_utils.

An FP16_Optimizer keeps its masters in `swapped_masters` around a torch optimizer, and in
`fused_masters` around one of amp_mp's.
"""

from amp_mp.apex.fp16_optimizer import FP16_Optimizer
from amp_mp.apex.fp16_utils import (
    BN_convert_float,
    master_params,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)
from amp_mp.apex.handle import AmpHandle, NoOpHandle, init

__all__ = [
    "AmpHandle",
    "BN_convert_float",
    "FP16_Optimizer",
    "NoOpHandle",
    "init",
    "master_params",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "tofp16",
]
