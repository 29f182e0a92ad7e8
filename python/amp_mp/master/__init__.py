"""float32 masters: for models in low precision, and around any torch optimizer."""

from amp_mp.master.convert import (
    BN_convert_float,
    convert_network,
    keep_fp32,
    network_to_half,
    tofp16,
)
from amp_mp.master.float32 import float32_state_dict, load_float32_state_dict
from amp_mp.master.fp16_optimizer import FP16_Optimizer
from amp_mp.master.helpers import (
    master_params,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from amp_mp.master.openseq2seq import MixedPrecisionOptimizerWrapper, mixed_precision
from amp_mp.master.prepare import prepare
from amp_mp.master.regularizer import l1, l2_half, l2_sum, mp_regularizer_wrapper
from amp_mp.master.typed_tensor import TypedTensor

__all__ = [
    "BN_convert_float",
    "FP16_Optimizer",
    "MixedPrecisionOptimizerWrapper",
    "TypedTensor",
    "convert_network",
    "float32_state_dict",
    "keep_fp32",
    "l1",
    "l2_half",
    "l2_sum",
    "load_float32_state_dict",
    "master_params",
    "master_params_to_model_params",
    "mixed_precision",
    "model_grads_to_master_grads",
    "mp_regularizer_wrapper",
    "network_to_half",
    "prep_param_lists",
    "prepare",
    "tofp16",
]
