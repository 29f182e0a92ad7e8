"""What scripts for Apex use: amp.init with its handle, FP16_Optimizer and fp16_utils."""

from amp_mp.apex.fp16_utils import (
    BN_convert_float,
    master_params,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)
from amp_mp.apex.larc import LARC
from amp_mp.model.convert import convert_network

# fmt: off
__all__ = [
    "LARC", "BN_convert_float", "convert_network", "master_params", "master_params_to_model_params",
    "model_grads_to_master_grads", "network_to_half", "prep_param_lists", "tofp16",
]
