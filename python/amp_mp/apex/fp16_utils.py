"""apex.fp16_utils: the parts of mixed precision by hand, and FP16_Optimizer."""

from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from amp_mp.apex.missing import missing_from
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

# fmt: off
__all__ = [
    "BN_convert_float", "FP16_Optimizer", "clip_grad_norm", "convert_network",
    "master_params_to_model_params", "model_grads_to_master_grads", "network_to_half",
    "prep_param_lists", "to_python_float", "tofp16",
]
# fmt: on
__getattr__ = missing_from(__name__)
to_python_float = Tensor.item
