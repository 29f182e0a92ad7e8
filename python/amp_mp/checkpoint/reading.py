"""What one call of `load` reads from a directory, for a model and its optimizer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from amp_mp.checkpoint.contents import Contents
from amp_mp.checkpoint.processes import run


@dataclass
class Reading:
    """The values of a file, sorted by owner; they are empty tensors, or None, until `read`.

    params: the model's parameters by name. targets: its state dict. groups, names: the names of the
    optimizer's parameters, group by group and together.
    weights: the model's state dict. states: what the optimizer of the file has kept, by a
    parameter's name and by entry. others: the rest and the optimizer's param_groups, by key.
    masters: float32 values by name, for weights whose dtype in the file is not the parameter's.
    """

    contents: Contents
    params: dict[str, Tensor]
    targets: dict[str, Any]
    groups: list[list[str]]
    names: set[str]
    weights: dict[str, Any]
    states: dict[str, dict[str, Any]]
    others: dict[str, Any]
    masters: dict[str, Tensor] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Lets torch fill the tensors; RuntimeError on all processes where one cannot read."""
        from torch.distributed.checkpoint import state_dict_loader

        places = [(self.others, key, key) for key in self.others]
        places += [(self.weights, name, f"{self.contents.model}{name}") for name in self.weights]
        places += [
            (state, entry, self.contents.states[name][entry])
            for name, state in self.states.items()
            for entry in state
        ]
        stored = self.contents.stored
        values = {stored[key]: owner[name] for owner, name, key in places}
        run(state_dict_loader.load, values, path, f"{path} could not be read; nothing was loaded")
        for owner, name, key in places:
            owner[name] = values[stored[key]]
