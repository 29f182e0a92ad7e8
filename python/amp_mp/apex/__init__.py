"""Apex's packages by their own names, for scripts that were written for it.

    import amp_mp.apex as apex
    from amp_mp.apex import amp

`register` makes `import apex` work, and `python -m amp_mp.apex script.py` runs a script with it.
"""

import sys
from importlib.util import find_spec

from amp_mp.apex import (
    amp,
    amp_C,
    contrib,
    fp16_utils,
    multi_tensor_apply,
    normalization,
    optimizers,
    parallel,
)
from amp_mp.apex.missing import explain_missing
from amp_mp.messages import warn

# fmt: off
__all__ = [
    "amp", "amp_C", "contrib", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers",
    "parallel", "register",
]
# fmt: on
# Apex's files, by package: each is here the package itself, which has the names of all of them.
FILES = {
    "amp": "_amp_state amp frontend handle scaler",
    "contrib.clip_grad": "clip_grad",
    "contrib.xentropy": "softmax_xentropy",
    "fp16_utils": "fp16_optimizer fp16util loss_scaler",
    "multi_tensor_apply": "multi_tensor_apply",
    "normalization": "fused_layer_norm",
    "optimizers": "fused_adagrad fused_adam fused_lamb fused_mixed_precision_lamb fused_novograd "
    "fused_sgd",
    "parallel": "LARC distributed optimized_sync_batchnorm sync_batchnorm",
}
for name, files in FILES.items():
    package = sys.modules[f"{__name__}.{name}"]
    for file in files.split():
        sys.modules[f"{package.__name__}.{file}"] = package
        shown = vars(package).setdefault(file, package)
        for each in package.__all__ if file in package.__all__ else ():  # parallel.LARC.LARC
            setattr(shown, each, getattr(package, each))
for package in (sys.modules[__name__], amp, contrib, parallel):
    explain_missing(package)


def register() -> None:
    """Makes `import apex`, `import apex.optimizers`, ... and `import amp_C` find what is here.

    Warns where Apex itself is installed, which is then not taken. RuntimeError where it was
    imported before.
    """
    own = sys.modules[__name__]
    if (other := sys.modules.get("apex")) not in (None, own):
        raise RuntimeError(
            f"register: apex of {getattr(other, '__file__', None)} was imported before; call "
            "amp_mp.apex.register() before the first `import apex`"
        )
    installed = None if other is own else find_spec("apex")
    if installed is not None and installed.origin:  # not just a folder of this name
        warn(f"`apex` is amp_mp.apex from now on, and not the one in {installed.origin}")
    here = {n: m for n, m in sys.modules.items() if f"{n}.".startswith(f"{__name__}.")}
    sys.modules.update({name.removeprefix("amp_mp."): module for name, module in here.items()})
    sys.modules["amp_C"] = amp_C
