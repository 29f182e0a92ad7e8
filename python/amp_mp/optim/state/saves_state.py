"""What a fused optimizer offers around its state: state dicts and a count of bytes."""

from typing import Any, ClassVar

import torch

from amp_mp.optim.rule import Group, Rule
from amp_mp.optim.state.checkpoint import restore_state, shown_state, torch_state_dict
from amp_mp.optim.state.memory_report import MemoryReport, report_memory


class SavesState(torch.optim.Optimizer):
    """The part of FusedOptimizer that saves, loads and counts the state.

    _chosen: how the master and each state are stored, by name, as the optimizer's arguments say.
    _own_defaults: the names of what every param_group has.
    """

    rules: ClassVar[tuple[Rule, ...]]
    _chosen: dict[str, str | None]
    _own_defaults: tuple[str, ...]

    def rule(self) -> Rule:
        """The rule for the param_groups as they are now."""
        return self.rules[0]

    def group_rules(self) -> list[Rule]:
        """The rule of each param_group."""
        return [self.rule()] * len(self.param_groups)

    def rules_of(self, group: Group) -> tuple[Rule, ...]:
        """The rules that a param_group may have, which may be one of a file."""
        return self.rules

    def complete(self, group: Group) -> None:
        """Gives a param_group the numbers and formats that it lacks."""
        for name in self._own_defaults:
            group.setdefault(name, self.defaults[name])

    def forget(self) -> None:
        """Drops what is derived from param_groups and state."""

    def memory_report(self) -> MemoryReport:
        """Bytes of weights, gradients, masters and states now, counted from their storages."""
        return report_memory(self)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; docs/formats.md lists the entries of a parameter's state.

        16-bit integers (entries `remainder16` and `NAME_ue8m8`) are shown as bfloat16 tensors of
        the same bits and memory, because gloo and NCCL carry no 16-bit integers.
        """
        return shown_state(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep the precision they were saved with.

        torch casts every state to its parameter's dtype, which would round masters and moments of
        low-precision parameters. States in another format than this optimizer's are converted. Load
        the model first: a split master is stored partly in the weights. Reads checkpoints of
        torch.optim too: a missing master is made from the parameter. Post-hooks see the state as it
        will be, and their edits stay. Raises ValueError, before anything is changed, naming an
        entry that is missing, or of a shape, dtype or value that does not fit.
        """
        load, formats = super().load_state_dict, tuple(self._chosen)
        restore_state(self, self.rules, self.rules_of, formats, state_dict, load)
        self.forget()

    def torch_state_dict(self) -> dict[str, Any]:
        """The state dict for the optimizer of torch.optim with the same name and float32 weights.

        States are decoded to float32. The float32 weights themselves are the masters:
        amp_mp.float32_state_dict.
        """
        return torch_state_dict(self, self.group_rules(), {*self._chosen, "rounding", "seed"})
