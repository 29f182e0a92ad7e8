"""Which layers a model has, and what each of them is for its types."""

from torch import nn

from amp_mp.model.kept_modules import float32_is_kept
from amp_mp.model.selection import is_normalisation

# What a layer is, for its types. The text is what a table says.
PLAIN = ""
NORM = "norm: weights, statistics and math at least FLOAT"
SOFTMAX = "softmax: math at least FLOAT"
LOSS = "loss: at least FLOAT"
KEPT = "keep_fp32: FLOAT unless named"
SELECTS = "selects values: math makes no difference"
LOOKS_UP = "looks up rows in the weight's own type"

SELECTING = (
    *(nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Threshold, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.PixelShuffle, nn.PixelUnshuffle),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.ChannelShuffle),
    *(nn.modules.padding._ConstantPadNd, nn.modules.padding._ReflectionPadNd),
    *(nn.modules.padding._ReplicationPadNd, nn.modules.padding._CircularPadNd),
)
SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.AdaptiveLogSoftmaxWithLoss)
# Modules of torch that use their children's weights without calling them.
WHOLE = (nn.MultiheadAttention, nn.AdaptiveLogSoftmaxWithLoss)


def layers_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The model's layers, each with its names; a shared one has several.

    A layer is a module without children, or one of torch's that does not call its children.
    """
    found: dict[nn.Module, list[str]] = {}
    inside: tuple[str, ...] = ()  # how the names of a layer's own parts begin
    for name, module in model.named_modules(remove_duplicate=False):
        parts = name.startswith(inside) or "parametrizations" in name.split(".")
        if parts or type(module).forward is nn.Module.forward:  # a list of modules has no forward
            continue
        children = {name for name, _ in module.named_children()} - {"parametrizations"}
        if not children or isinstance(module, WHOLE):
            found.setdefault(module, []).append(name)
            inside += (f"{name}." if name else "",)
    return found


def kinds_of(model: nn.Module) -> dict[nn.Module, str]:
    """What each layer of the model is: one of the kinds above."""
    kept = [m for m in model.modules() if float32_is_kept(m) and not is_normalisation(m)]
    inside = {part for module in kept for part in module.modules()}
    return {module: _kind(module, module in inside) for module in layers_of(model)}


def _kind(module: nn.Module, is_kept: bool) -> str:
    """The first kind that fits."""
    kinds = {
        LOSS: isinstance(module, nn.modules.loss._Loss),
        NORM: is_normalisation(module),
        KEPT: is_kept,
        SOFTMAX: isinstance(module, SOFTMAXES),
        LOOKS_UP: isinstance(module, nn.Embedding | nn.EmbeddingBag),
        SELECTS: isinstance(module, SELECTING),
    }
    return next((kind for kind, fits in kinds.items() if fits), PLAIN)
