"""apex.fp16_utils: the parts of mixed precision by hand, and FP16_Optimizer."""

from amp_mp.model.convert import convert_network
from amp_mp.wrappers.fp16_optimizer import FP16_Optimizer
from amp_mp.wrappers.fp16_utils import (
    BN_convert_float,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)

__all__ = [
    "BN_convert_float",
    "FP16_Optimizer",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "tofp16",
]
