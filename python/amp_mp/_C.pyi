"""The native library's signatures; csrc/torch/ops.h and csrc/torch/step/step.h explain them."""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, TypedDict

import torch
from torch import Tensor

from amp_mp.apex import amp_C as amp_C  # a submodule

Tensors = Sequence[Tensor | None]

def build_info() -> dict[str, Any]:
    """What this library was built for: torch, CUDA, instruction set in use, compiler."""

def bind_python(**functions: Callable[..., Any]) -> None:
    """The functions that native code calls, once: csrc/torch/python/functions.h."""

class FormatEntry(TypedDict):
    """One line of csrc/core/format_list.h."""

    name: str
    dtype: torch.dtype  # of the data
    width: int  # bytes of an element of it
    second_dtype: torch.dtype | None  # of the second array, None if the format has one array
    second_width: int  # bytes of an element of it, else 0
    group: int  # how many elements of data share an element of the second array
    stochastic: bool  # whether storing draws random bits
    split: bool  # whether one array is a low-precision weight
    kinds: tuple[str, ...]  # arrays it may serve: "grad", "master", "moment", "square"

def formats() -> list[FormatEntry]:
    """All formats, in the order of the native enumeration."""

def scale_kinds() -> dict[str, tuple[str, ...]]:
    """The loss-scale policies of csrc/core/scale.h by name: the fields of their state.

    A state is a float64 tensor: the policy's position in this dict, then the fields.
    """

class Measurement:
    """Statistics of one read of tensors; on CUDA sums of spans, which the step's kernel adds."""

    def __init__(self, rows: Tensor) -> None:
        """Statistics that are known already, in the form of `rows`; else TypeError, ValueError."""

    @property
    def rows(self) -> Tensor:
        """In the form of `measure`; adds the spans now if no kernel has."""

class DeviceReport:
    """One decision of a CUDA device: csrc/plan.h, StepReport."""

    @property
    def number(self) -> int:
        """Of the decision, from 1."""
    @property
    def next_scale(self) -> float:
        """The new loss scale; 0 if the decision did not update it."""
    @property
    def skipped_in_a_row(self) -> int: ...

class StepReports:
    """A CUDA device's last decisions in host memory: csrc/torch/step/step_reports.h."""

    def __init__(self, device: torch.device) -> None:
        """RuntimeError while a CUDA graph is being captured."""

    @property
    def device(self) -> torch.device: ...
    def newest(self, wait: bool) -> DeviceReport | None:
        """The last decision that has reached the host; None before the first."""

class ScaleUpdate:
    """How a loss scale is updated, in place or into other tensors: csrc/torch/step/step.h.

    policy: float64 state of a policy, with scale_out float32 [1] to follow it; or, without, torch's
    float32 scale and int32 growth tracker.
    """

    def __init__(
        self,
        *,
        policy: Tensor | None = None,
        policy_out: Tensor | None = None,
        scale: Tensor | None = None,
        scale_out: Tensor | None = None,
        tracker: Tensor | None = None,
        tracker_out: Tensor | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None: ...

def measure(tensors: Tensors) -> Tensor:
    """float64 [n + 1, 3]: sum of squares, largest finite |x|, non-finite count; last: total."""

def orthogonalise_(
    stack: Tensor, group: dict[str, Any], factor: float = 1.0, *, stack_bytes: int = ...
) -> None:
    """Newton-Schulz of each matrix of a bfloat16 stack: csrc/torch/muon/orthogonalise.cpp."""

def ns_iterations(group: dict[str, Any]) -> list[list[float]]:
    """A param_group's polynomials, or ValueError: csrc/torch/muon/newton_schulz.h."""

class WholeMatrices:
    """Makes updates of directions where this process has all of each matrix; same file.

    One each for the parameters: the memory here, the param_group, and the blocks of its matrices,
    (count, rows, columns, factor), None for a parameter that is not for this object.
    """

    def __init__(
        self,
        locals: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        blocks: Sequence[Sequence[tuple[int, int, int, float]] | None],
    ) -> None: ...
    @property
    def offsets(self) -> list[int]:
        """Where each parameter's directions begin, in elements, and where the last ones end."""
    def __call__(self, directions: Tensor) -> Tensor:
        """The same tensor, with updates in place of the directions."""

def restored(
    entries: SavedEntries,
    groups: Groups,
    state_dict: dict[str, Any],
    seed: int,
) -> list[dict[str, Any] | None]:
    """A file's states, of each parameter, as the groups store theirs: torch/state/restore.cpp."""

def wrong_clock(value: Any, name: str) -> str:
    """What is wrong with a number of a parameter's clock; empty where it can be."""

class SavedEntries:
    """All entries that the states of an optimizer may have, which may use these rules."""

    def __init__(self, rules: Rules) -> None: ...
    def in_bytes(self) -> set[str]:
        """The entries of 16-bit integers, which state dicts show as bytes."""

def wrong_state(
    entries: SavedEntries,
    rule: Rule,
    states: list[dict[str, Any] | None],
    params: list[Tensor],
) -> tuple[int, tuple[str, str]] | None:
    """The first of these parameters whose saved state cannot be loaded, by its place.

    With the entry and what is wrong with it. rule: their param_group's.
    """

# What csrc/torch/state/rule_table.h knows of rules (optim/rule.py, Rule).

class Rule:
    """What a rule declares (core/rules), with the entries of its states; optim/rule.py has it."""

    def __init__(
        self, operator: str, *, row_state: str | None = None, options: Sequence[str] = []
    ) -> None:
        """ValueError for a name that no operator has. row_state: a state of kind "row" besides.

        options: entries of a param_group that a step's tensors depend on, besides formats.
        """

    @property
    def kinds(self) -> dict[str, str]:
        """`kinds_of` it alone."""
    @property
    def is_layerwise(self) -> bool:
        """Whether a step depends on norms of whole tensors."""
    @property
    def number_keys(self) -> set[str]:
        """The entries of a param_group that it reads where the optimizer has them."""
    @property
    def own_number(self) -> tuple[str, float] | None:
        """The one number that it keeps for every parameter, and what it is at first."""

Rules = Sequence[Rule]

def kinds_of(rules: Rules) -> dict[str, str]:
    """By name, what each state that any of the rules has may be stored as.

    "moment" is an average of gradients, "matrix_moment" one of which updates of whole matrices are
    made, "square" an average or sum of squares, "exact" is float32 always, "row" is float32, one
    number for each row of the parameter's matrices.
    """

def allowed_numbers() -> dict[str, str]:
    """What the entries of param_groups may be that rules read, by name; "betas[0]" of a pair.

    A "flag", or a number: "any", "not negative", "[0, 1)" or "[0, 1]".
    """

def clock_entries() -> set[str]:
    """The entries of the numbers that a parameter's clock consists of (core/rules/base.h)."""

def master_entries() -> dict[str, torch.dtype]:
    """The entries that make a low-precision parameter a master, and their dtypes."""

def coded_endings() -> list[str]:
    """How the names of entries of codes end: "_m8"."""

def is_on_host(tensor: Tensor) -> bool:
    """Whether a CUDA tensor is offloaded to memory of the host; no DTensor."""

def copies_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """CPU tensors of the same values, complete on return: csrc/torch/state/host_memory.h.

    Each has a storage of its own, of its exact size; those of large CUDA tensors are pinned.
    """

def used_on_current_stream(tensors: Sequence[Tensor]) -> None:
    """Keeps memory of other streams, once it is freed, until the current stream has come so far.

    For what was made on a stream that may be another, and is dropped after its use here.
    """

def combine(rows: Tensor) -> Tensor:
    """`measure`'s result, float64 [n + 1, 3], for tensors whose rows [n, 3] are known."""

def copy_(
    to: Sequence[Tensor],
    from_: Sequence[Tensor],
    *,
    verdict: Tensor | None = None,
    multiplier: float = 1.0,
    saturate: bool = False,
) -> None:
    """to[i] = from_[i] * multiplier; nothing where the verdict says overflow."""

def clip_grad_norm_(
    parameters: Sequence[Tensor], max_norm: float, error_if_nonfinite: bool
) -> Tensor | None:
    """torch's for the 2-norm, in place; None where only torch's takes these gradients.

    Returns the norm, float32 of no dimension.
    """

def larc_(
    grads: Tensors,
    weights: Sequence[Tensor],
    roots: Tensor,
    groups: Sequence[dict[str, Any]],
    trust_coefficient: float,
    clip: bool,
    eps: float,
    scale: Tensor | float | None,
    keeps: bool,
) -> Tensor | None:
    """LARC's gradients, in place, and the scale that they keep: csrc/torch/larc.cpp."""

def qk_clip_factors(
    max_logits: Tensor,
    threshold: float,
    alpha: float,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """gamma [query heads], and factors of the rows of the queries and of the keys, float32."""

def average_(
    to: Sequence[Tensor],
    to_masters: Tensors,
    from_: Sequence[Tensor],
    from_masters: Tensors,
    decay: float,
) -> None:
    """to[i] += (1 - decay) * (from_[i] - to[i]) in float32.

    A master and its tensor together are the number: a float32 tensor, or remainders.
    """

def float8_amax(weight: Tensor, first_row: int = 0, first_column: int = 0) -> Tensor:
    """The largest finite magnitude of each block of [..., rows, columns], float32.

    The weight is contiguous, and begins in this row and column of its first block.
    """

def float8_scales(amax: Tensor, is_power: bool) -> Tensor:
    """The scales of such blocks: float32, or powers of two as uint8 (E8M0)."""

def float8_encode(
    weight: Tensor,
    is_power: bool,
    is_mx: bool,
    scales: Tensor | None = None,
    first_row: int = 0,
    first_column: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales: csrc/core/float8.h. By the given scales, where other processes have parts.

    is_mx: blocks are 32 weights of a row.
    """

def update_scale_(
    update: ScaleUpdate,
    found_inf: Tensor,
    max_abs: Tensor | None = None,
    reports: StepReports | None = None,
) -> None:
    """Moves a loss scale after a step; found_inf and max_abs float64 [1]."""

def check_weights(weights: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises, as a step does, where a weight cannot be written or two of them share memory."""

def has_groups(format: str, param: Tensor) -> bool:
    """Whether a format's groups fit into a parameter's rows: csrc/torch/state/arrays.h."""

def second_shape(format: str, param: Tensor, part: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape of a format's second array beside a parameter, or beside a shard of shape part."""

def copy_as(value: Tensor, dtype: torch.dtype | None, local: Tensor) -> Tensor:
    """A copy of a plain tensor in a dtype, by default its own, in the layout and device of `local`.

    A value that shows the bytes of 16-bit integers becomes these; other numbers are converted.
    """

def encode(
    values: Tensor, format: str, *, seed: int = 0, step: int = 0, tensor_index: int = 0
) -> tuple[Tensor, Tensor | None]:
    """New arrays of a format, in the layout of the values that they hold."""

def decode(data: Tensor, second: Tensor | None, format: str) -> Tensor:
    """float32, in the shape and layout of data, which is dense."""

def decoded_states(rule: Rule, param: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """What a parameter's state holds of a rule's states, by name: float32, placed as param."""

class Stamp:
    """A tensor's version counter and memory now. Writes through .data advance no counter."""

    def __init__(self, tensor: Tensor) -> None: ...
    def still(self, tensor: Tensor) -> bool:
        """Whether the tensor was not written or moved since."""

class Weight:
    """The record of a weight, which owns its master: csrc/torch/weights/weight.h."""

    is_prepared: bool
    is_replaced: bool
    @property
    def is_lost(self) -> bool: ...
    @property
    def is_stepped(self) -> bool: ...
    @property
    def tensors(self) -> list[Tensor]: ...
    @property
    def entry(self) -> str | None: ...
    def store(self, param: Tensor, values: Tensor, exactly: bool = True) -> None: ...
    def is_unwritten(self, param: Tensor) -> bool: ...
    def stamp(self, param: Tensor) -> None: ...
    def drop(self) -> None: ...
    def state(self, param: Tensor) -> Any: ...
    def set_state(self, param: Tensor, state: Any) -> None: ...

def weight_of(param: Tensor) -> Weight | None:
    """The parameter's record; None where it has none."""

def weight_at(param: Tensor, owner: Any = None) -> Weight:
    """The same, made where it has none. owner: the module of a DTensor."""

class Loan:
    """Parameters that AveragedModel.swap borrows: csrc/torch/weights/loans.h."""

    is_any: Final[bool]  # whether any parameter is borrowed now
    def __init__(self, params: Sequence[Tensor]) -> None: ...
    def borrow(self, what: str) -> None:
        """Borrows them, until give_back; raises as refuse_borrowed."""

    def give_back(self) -> None:
        """Ends that; does nothing a second time."""

def refuse_borrowed(params: Iterable[Any], what: str, reads: bool = False) -> None:
    """Raises RuntimeError if a swap or a block of masters() has one of the parameters.

    what: which call, for the message. reads: it only reads them, which a block allows.
    """

def float32_of(param: Tensor, stepping: bool = False) -> Tensor:
    """The float32 values of a parameter, a new plain tensor; of a DTensor those on this process.

    stepping: for an optimizer that has state for it; see csrc/torch/weights/weight.h.
    """

def float32_master(param: Tensor) -> Tensor:
    """float32_of a low-precision weight as a master beside it, placed as it.

    A value half way between two weights becomes the nearest number that rounds to this one.
    """

def masters_beside(params: Sequence[Tensor], stepping: Sequence[bool]) -> list[Tensor | None]:
    """Remainders or float32 values beside the weights, to be read only."""

def master_values(weight: Tensor, entries: dict[str, Any]) -> Tensor | None:
    """The float32 values of a weight and the master in a file's state; None for none there."""

def master_part(entry: str, value: Tensor, param: Tensor) -> tuple[str, Tensor]:
    """This process's part of a file's master: a new tensor, and the entry that it belongs under.

    Packed remainders that do not fit the parameter's part become those of split24. All processes
    must call it in turn.
    """

def take_entries(params: list[Tensor], states: list[Any]) -> None:
    """Makes what the states have under masters' names the weights' masters; None without state.

    ValueError where one does not go with its weight.
    """

def put_entries(groups: Groups, states: States, takes: bool = True) -> None:
    """Shows the weights' masters in an optimizer's states; takes: after take_entries."""

def weight_states(params: Sequence[Tensor]) -> list[Any]:
    """What a copy or a pickle keeps of the weights' records; None for a weight without master."""

def set_weight_states(params: Sequence[Tensor], states: Sequence[Any]) -> None:
    """Gives copied weights these masters, but for those that have one."""

def release_weights(params: Sequence[Tensor]) -> None:
    """Ends the weak references to the parameters, so that torch.utils.swap_tensors takes them."""

class WeightChanges:
    """Notes of which of a parameter's weights change: csrc/torch/weights/weight_changes.h."""

    def __init__(self, param: Tensor, dtype: torch.dtype) -> None: ...
    @property
    def memory(self) -> Tensor:
        """int64: the sum, then the bits."""
    @property
    def dtype(self) -> torch.dtype: ...
    def follow(self, param: Tensor) -> bool:
        """Whether they are the parameter's; then they are on its device afterwards."""

def watch(param: Tensor, owner: Any, changes: WeightChanges) -> None:
    """Has steps note the parameter's changes from now on, for as long as `changes` lives."""

def changes_of(param: Tensor) -> WeightChanges | None:
    """The notes that steps of the parameter make; None for none."""

def watched(params: Iterable[Tensor]) -> list[tuple[Tensor, WeightChanges]]:
    """Those of the parameters that have notes, with these."""

def compare(
    after: Sequence[Tensor],
    before: Sequence[Tensor | None],
    memory: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Notes in each memory which weights are others; without `before` adds all to the sum."""

class Looked:
    """What one look at watched tensors of a device has found: csrc/torch/weights/looks.cpp."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        notes: Sequence[WeightChanges | None],
        counting: Sequence[tuple[tuple[int, int, int], bool]],
    ) -> None:
        """Reads each tensor once, and waits for the device once.

        counting: of each, if `gather` will be called: the origin of its positions, and whether they
        are int64, not int32.
        """
    @property
    def found(self) -> list[list[int]]:
        """Of each tensor: its sum, the sum that its notes have, and how many bits are set."""
    def gather(
        self, which: Sequence[int], weights: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Positions where the bits of these tensors are set, and the weights there. Once."""
    def is_current(self) -> bool:
        """Whether the notes have the sums that were found."""
    def clear(self) -> None:
        """Lets the notes begin anew with the weights that were looked at."""

def scatter(
    targets: Sequence[Tensor], positions: Sequence[Tensor], values: Sequence[Tensor]
) -> list[int]:
    """Writes values to flat positions, unless one is outside. How many are, for each tensor."""

def note_gradients(params: Iterable[Tensor], scale: float | None = None) -> None:
    """Notes the parameters' gradients as they are now.

    scale: by which they are still to be divided; None for true ones.
    """

def gradient_scales(params: Iterable[Tensor]) -> dict[Tensor, float | None]:
    """The parameters whose gradients are noted, also if a script has written them since.

    With the scale by which each is still to be divided; None for a true one.
    """

def unwritten_gradients(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters whose gradients are noted and were not written since."""

def forget_gradients(params: Iterable[Tensor]) -> None:
    """Strikes the notes of the parameters' gradients, which were cleared."""

def first_masters(params: Sequence[Tensor]) -> list[Tensor]:
    """A float32 master for each parameter, placed as it: the present one, or a new one."""

def adopt_masters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Says that these, in param_groups, are the parameters' masters from now on.

    Elements that do not round to the parameters become these.
    """

def take_over_masters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Copies into the masters what other optimizers have made of the parameters since."""

def follow_masters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """The same; then remakes masters that do not round to their parameters.

    Those that were written themselves stay. RuntimeError for parameters that hold averages.
    """

def round_masters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Rounds the masters into the parameters; float16 saturates at +-65504."""

def written_masters(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose masters in param_groups a script has written; but no borrowed ones."""

def round_written_masters(params: Iterable[Tensor]) -> None:
    """Rounds the masters of `written_masters` into their parameters."""

class Gemm:
    """cublasGemmEx of a cuBLAS that is loaded already, such as "libcublas.so.13"."""

    def __init__(self, library: str) -> None:
        """RuntimeError where no such library is loaded, or it has no such function."""

def accumulate_weight_grad_(
    grad_weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    gemm: Gemm | None = None,
    handle: int = 0,
) -> None:
    """grad_weight [out, in] += grad_output [..., out]^T input [..., in], summed in float32."""

def accumulates(leaf: Tensor) -> bool | None:
    """In a backward: whether the gradient is added to .grad, or returned; None: not asked for."""

def is_nested_backward() -> bool:
    """Whether this thread works for a backward pass that runs inside of another."""

def autograd_functions() -> set[type]:
    """The classes of the torch.autograd.Functions in the graph of the backward pass under way."""

Groups = list[dict[str, Any]]
States = MutableMapping[Tensor, dict[str, Any]]

class EditBlock:
    """A block of `optimizer.masters`, which edits masters: csrc/torch/state/edit_block.h."""

    def __init__(
        self,
        rules: Rules,
        groups: Groups,
        states: States,
        params: list[tuple[str, Any]],
    ) -> None:
        """params: each with its name for messages."""

    @property
    def masters(self) -> list[Tensor]:
        """Float32 tensors in the order of the parameters, the same one for the same parameter."""

    def borrow(self) -> None:
        """Borrows the parameters, until give_back; raises as refuse_borrowed, and borrows none."""

    def give_back(self) -> None:
        """Ends that; does nothing a second time."""

    def store(self) -> None:
        """Stores what was written."""

class GroupInfo:
    """What a step has to know of param_groups besides what they hold: csrc/torch/step/bucket.h."""

    def __init__(
        self,
        own_keys: Collection[str],
        matrices: dict[int, tuple[tuple[int, int], dict[str, float]]],
    ) -> None:
        """own_keys: a set of the groups' entries that are the optimizer's; others are not read.

        matrices: of each parameter whose update is a whole matrix, by its number among all: the
        shape of its matrices, and the numbers that Hyper has for such, by name.
        """

class Bucket:
    """The parameters with state of one device and rule, with their slots.

    Made here, it has one parameter, for a step of its own.
    """

    def __init__(
        self,
        rules: Rules,
        groups: Groups,
        states: States,
        info: GroupInfo,
        param: Tensor,
        group: int,
        tensor_index: int,
        label: str,
    ) -> None:
        """Makes the missing state; TypeError, ValueError as a step. group: the param_group's index.

        tensor_index: the parameter's among all. label: for messages.
        """

    @property
    def rule(self) -> Any:
        """The optim.rule.Rule of its parameters."""
    @property
    def members(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Its parameters in the order of the slots, each with its param_group."""

    make_updates: Callable[[Tensor], Tensor] | None  # optim/rule.py, MakeUpdates
    def is_of(self, rules: Rules, groups: Groups, states: States) -> bool:
        """Whether state and groups hold what the bucket was made of."""

    def find_gradients(self) -> None:
        """Before measuring and a step: DTensors' gradients as they are now."""

    def measure(self) -> Measurement: ...
    def step(
        self,
        groups: Groups,
        measured: Measurement | None,
        scale: Tensor | float | None,
        max_norm: float | None,
        total: Tensor | None = None,
    ) -> None:
        """One step; decides from `total`, float64 [3], where it is given, else from `measured`."""

class Measured:
    """The gradients' statistics, read before the step that uses them."""

    def totals(self) -> dict[torch.device, Tensor]:
        """float64 [3] per device: sum of squares, largest finite |g|, number of inf and NaN."""

# A step, how many in a row were skipped with it, its scale and norm, and whether for the norm.
Skipped = tuple[int, int, float, float, bool]

class StepInputs:
    """What a loss scaler passes to a step: csrc/torch/step/steps.h."""

    def __init__(
        self,
        scale: Tensor | float | None = None,
        found_inf: Tensor | float | None = None,
        *,
        measure: bool = False,
    ) -> None: ...
    @property
    def found_inf(self) -> Tensor | float | None: ...
    scale: Tensor | float | None
    measured: Measured | None
    max_norm: float | None
    scale_update: ScaleUpdate | None

class NormLimit:
    """When a step is skipped for its norm: csrc/core/norm_limit.h.

    fixed: above this norm, 0 for none. sigmas, window: a NormSpike's, 0 for none.
    """

    def __init__(self, fixed: float = 0.0, *, sigmas: float = 0.0, window: float = 0.0) -> None: ...

class StepLog:
    """The decisions of an optimizer's steps: csrc/torch/step/steps.h."""

    @property
    def count(self) -> int:
        """Steps so far."""
    @property
    def verdict(self) -> Tensor | None:
        """The last step's: skip (1 overflow, 2 spike), multiplier, norm, max_abs, scale."""
    @property
    def scale_updated(self) -> bool:
        """Whether the last step has moved the loss scale by its inputs' scale_update."""
    @property
    def reports(self) -> StepReports | None: ...
    def decide(
        self, device: torch.device, totals: list[Tensor], scale: Tensor | float | None
    ) -> Tensor:
        """A verdict from float64 [3] of each device, which becomes the last step's."""

    def forget(self) -> None:
        """Drops the last step's verdict."""
    def newest(self, wait: bool) -> tuple[Any, ...] | None:
        """A StepReport's fields, of the last step that the host knows."""

    def skipped(self) -> Skipped | None:
        """Where the last step on the host was skipped: what was."""

class Collectives:
    """The functions that add statistics over processes: sharding.reduction.WholeStatistics."""

    def __init__(
        self,
        totals: Callable[[list[Measurement]], list[Measurement]],
        of_tensors: Callable[
            [list[Measurement], list[Measurement]], tuple[list[Measurement], list[Measurement]]
        ],
        updates_of: Callable[[int], Callable[[Tensor], Tensor]],
    ) -> None: ...

class Gathered:
    """An optimizer's tensors for its steps: csrc/torch/step/gathered.h."""

    @property
    def buckets(self) -> list[Bucket]: ...
    @property
    def held(self) -> list[tuple[torch.device, list[int], list[int]]]:
        """Of each bucket: its device, its parameters' numbers, and those that may come."""
    @property
    def has_dtensors(self) -> bool: ...
    def is_current(self, rules: Rules, groups: Groups, states: States) -> bool:
        """Whether gathering again would find the same tensors in the same places."""

    collectives: Collectives | None  # where other processes have parts of parameters

class Steps:
    """The steps of an optimizer: csrc/torch/step/steps.h."""

    def __init__(self) -> None: ...
    @property
    def log(self) -> StepLog: ...
    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph has captured a step of the tensors that there are now."""
    def forget(self) -> None:
        """Drops the last step's report; call it before the gathered tensors are let go."""
    def gather(self, rules: Rules, groups: Groups, states: States, info: GroupInfo) -> Gathered:
        """An optimizer's tensors, checked, with the state that was missing."""
    def step(
        self,
        gathered: Gathered,
        groups: Groups,
        inputs: StepInputs,
        *,
        checks: bool = False,
        max_norm: float | None = None,
        limit: NormLimit | None = None,
    ) -> Skipped | None:
        """One step; returns what `log.skipped` does.

        checks: whether the optimizer needs statistics of the gradients. max_norm: its
        max_grad_norm. limit: its skip_norm_above.
        """

    # What a NormSpike knows (csrc/core/norm_limit.h), None before it was needed; read it waits.
    norm_history: tuple[float, float, float, float] | None
    def measure(self, gathered: Gathered) -> Measured:
        """Reads the gradients once, for a step that gets the result in its inputs."""

def params_of(group: dict[str, Any]) -> Sequence[Tensor]:
    """A group's parameters; TypeError for what is not a sequence."""

def have_params(groups: Groups, params: Sequence[Tensor]) -> bool:
    """Whether the groups hold exactly these parameters."""

def refuse_params(group: dict[str, Any], number: int) -> None:
    """TypeError, by name, for a parameter of a param_group that no step can update.

    Frozen ones may have any dtype. number: the group's place.
    """

def param_label(group: Mapping[str, Any], number: int, position: int) -> str:
    """A parameter's place in its optimizer's param_groups, and its name if the group has names."""

def init_states(rules: Rules, groups: Groups, states: States) -> None:
    """Makes the state of every trainable parameter; raises before anything is made."""

def scalar_on(device: torch.device, number: Tensor | float | None) -> Tensor | None:
    """A number as a float32 tensor of one element on the device."""

def decide(
    device: torch.device,
    totals: list[Tensor],
    *,
    scale: Tensor | float | None = None,
    max_norm: float | None = None,
) -> Tensor:
    """A verdict, float64 [5]. totals: results of `measure`, one per device, or none."""

class products:  # noqa: N801 (a submodule)
    """Products of low-precision tensors in float32: csrc/torch/products/products.h."""

    work: dict[str, int]  # multiplications of each shape that `measure` measures
    # What `choose` was called with, of each dtype: the word and the seconds. Native code writes it.
    chosen: dict[torch.dtype, tuple[str, dict[str, dict[str, float]]]]
    @staticmethod
    def choose(dtype: torch.dtype, products: str, seconds: dict[str, dict[str, float]]) -> None: ...
    @staticmethod
    def choice(dtype: torch.dtype) -> str: ...
    @staticmethod
    def ways(dtype: torch.dtype) -> dict[str, str]: ...
    @staticmethod
    def measure(dtype: torch.dtype) -> dict[str, dict[str, float]]: ...
    @staticmethod
    def fuse_norms() -> None: ...

class casting:  # noqa: N801 (a submodule)
    """The op-policy table: the headers of csrc/torch/casting."""

    @staticmethod
    def policy_names() -> list[str]: ...
    @staticmethod
    def op_list(name: str) -> list[tuple[str, list[str]]]:
        """A list of op_lists.h: "apex", "apex cpu", "torch cpu" or "torch cuda"."""

    @staticmethod
    def set_policy(device: str, op: str, policy: str) -> str: ...
    @staticmethod
    def policies(device: str) -> dict[str, str]: ...
    @staticmethod
    def uninstall() -> None: ...
    @staticmethod
    def clear_cache() -> None: ...
    @staticmethod
    def set_keeps_casts(keep: bool) -> bool: ...
    @staticmethod
    def optimizer_stepped() -> None: ...
    @staticmethod
    def guard_steps() -> None: ...
    @staticmethod
    def cached() -> dict[Tensor, Tensor]: ...
    @staticmethod
    def set_trace(mode: int) -> None: ...
    @staticmethod
    def take_log() -> list[tuple[str, str, str, str, bool]]: ...
