"""Calls `amp_mp._C` with arguments that are right but for one or two, as a child process.

    python native_fuzz.py FIRST COUNT

calls with the seeds FIRST, FIRST + 1, ... and prints each before its call, so that the last line
names the one that ended the process. Every tensor lies between guards in a larger one. The exit
status is 1 where a call has written beyond a tensor, or raised what is not a plain Python error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from list_calls import list_call
from torch import Tensor

import amp_mp as amp
from amp_mp import _C
from amp_mp.optim.base import rules_of

ALLOWED = (
    *(TypeError, ValueError, IndexError, KeyError, RuntimeError, NotImplementedError),
    *(AttributeError, OverflowError, AssertionError, torch.OutOfMemoryError),
)
GUARD = 64  # bytes on either side
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int16, torch.int8),
    *(torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn),
)
SHAPES: tuple[tuple[int, ...], ...] = (
    (2, 32),
    (64,),
    (),
    (0,),
    (1,),
    (3,),
    (5, 7),
    (2, 3, 4),
    (4, 64),
)
FORMATS = [row["name"] for row in _C.formats()]
Arguments = dict[str, Any]
Call = tuple[Callable[..., Any], Arguments]


class WrongCall(BaseException):
    """The native library has no such function, or it takes other arguments."""


class Fuzz:
    """One seed: a call, its arguments, and what is changed of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.buffers: list[tuple[Tensor, int]] = []
        torch.manual_seed(seed)

    # Tensors.

    def tensor(
        self, shape: tuple[int, ...] = (2, 32), dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Numbers between guards."""
        count = torch.Size(shape).numel()
        width = torch.empty((), dtype=dtype).element_size()
        buffer = torch.full((2 * GUARD + count * width,), 0x5A, dtype=torch.uint8)
        own = buffer[GUARD : GUARD + count * width].view(dtype).view(shape)
        if dtype.is_floating_point or dtype.is_complex:
            own.copy_(torch.randn(shape))
        else:
            own.zero_()
        self.buffers.append((buffer, count * width))
        return own

    def doubles(self, *shape: int) -> Tensor:
        return self.tensor(shape, torch.float64).abs_()

    def check_guards(self) -> None:
        for buffer, width in self.buffers:
            for side in (buffer[:GUARD], buffer[GUARD + width :]):
                assert bool((side == 0x5A).all()), "a call has written beyond a tensor"

    def changed_tensor(self, t: Tensor) -> Any:
        """Another tensor in its place, of the kinds that users hand over."""
        shape, dtype = tuple(t.shape), t.dtype
        kinds: list[Callable[[], Any]] = [
            lambda: self.tensor(shape, self.random.choice(DTYPES)),
            lambda: self.tensor(self.random.choice(SHAPES), dtype),
            lambda: self.tensor(self.random.choice(SHAPES), self.random.choice(DTYPES)),
            lambda: self.tensor((*shape, 2), dtype)[..., 0],
            lambda: self.tensor((), dtype).expand(shape),
            lambda: self.tensor(shape[::-1], dtype).permute(*reversed(range(len(shape)))),
            lambda: torch._efficientzerotensor(shape, dtype=dtype),
            lambda: self.shrunk(shape, dtype),
            lambda: torch.empty(shape, dtype=dtype, device="meta"),
            lambda: self.tensor(shape, dtype).to_sparse(),
            lambda: torch._neg_view(self.tensor(shape, dtype)),
            lambda: self.inference(shape, dtype),
            lambda: self.tensor(shape, dtype).requires_grad_(),
            lambda: torch.nn.Parameter(self.tensor(shape, dtype), requires_grad=False),
            lambda: self.tensor(shape, dtype).fill_(float("nan")),
            lambda: self.tensor(shape, dtype).fill_(float("inf")),
            lambda: t.detach(),
        ]
        try:
            return self.random.choice(kinds)()
        except (RuntimeError, NotImplementedError):  # torch has no such tensor
            return None

    def shrunk(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = torch.zeros(shape, dtype=dtype)
        found.untyped_storage().resize_(found.untyped_storage().nbytes() // 2)
        return found

    def inference(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode():
            return torch.zeros(shape, dtype=dtype)

    # Arguments.

    def strange(self) -> Any:
        return self.random.choice(
            [
                *(None, 0, -1, 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64, 1e300, -0.5),
                *(float("nan"), float("inf"), True, "", "float32", "m8", "no such", b"x", [], ()),
                *({}, [None], [[]], object(), torch.float32, torch.device("meta"), len),
                torch.zeros(3),
            ]
        )

    def changed(self, value: Any) -> Any:
        """Something else, often of its own type."""
        pick = self.random.random()
        if pick < 0.15:
            return self.strange()
        if isinstance(value, Tensor):
            return self.changed_tensor(value)
        if isinstance(value, list | tuple):
            items = list(value)
            if not items or pick < 0.3:
                items.insert(self.random.randint(0, len(items)), self.strange())
            elif pick < 0.45:
                items.pop(self.random.randrange(len(items)))
            elif pick < 0.55:
                items.append(items[self.random.randrange(len(items))])
            else:
                at = self.random.randrange(len(items))
                items[at] = self.changed(items[at])
            return type(value)(items)
        if isinstance(value, dict) and value:
            key = self.random.choice(list(value))
            if pick < 0.3:
                return {k: v for k, v in value.items() if k is not key}
            return {**value, key: self.changed(value[key])}
        if isinstance(value, str):
            return self.random.choice(
                [*FORMATS, "none", "split32", "split24", "split20", "", "no such"]
            )
        if isinstance(value, bool):
            return not value
        if isinstance(value, int | float):
            return self.random.choice([0, -1, 1, 7, 2**31, 2**62, 1e300, float("nan"), -value])
        return self.strange()

    def maybe(self, value: Any) -> Any:
        return self.random.choice([None, value])

    # Calls.

    def policy(self) -> Tensor:
        kinds = _C.scale_kinds()
        number = self.random.randrange(len(kinds))
        state = self.doubles(len(list(kinds.values())[number]) + 1)
        state[0] = number
        return state

    def scale_update(self) -> _C.ScaleUpdate:
        if self.random.random() < 0.5:
            given: Arguments = {
                "policy": self.policy(),
                "policy_out": self.maybe(self.policy()),
                "scale_out": self.maybe(self.tensor((1,))),
            }
        else:
            given = {
                "scale": self.tensor((1,)),
                "scale_out": self.tensor((1,)),
                "tracker": self.tensor((1,), torch.int32),
                "tracker_out": self.tensor((1,), torch.int32),
            }
        return _C.ScaleUpdate(**(self.changed(given) if self.random.random() < 0.3 else given))

    def optimizer(self) -> tuple[Any, Any, Any, Any]:
        dtype = self.random.choice([torch.float32, torch.bfloat16, torch.float16])
        kind = self.random.choice([amp.optim.AdamW, amp.optim.SGD, amp.optim.LAMB, amp.optim.Lion])
        memory = self.random.choice(
            ["float32", "exact", "lean", "tiny", "micro", "nano", "masterless"]
        )
        params = [torch.nn.Parameter(self.tensor((2, 32), dtype)) for _ in range(2)]
        made = kind(params, lr=0.1, memory=memory)
        for param in params:
            param.grad = self.tensor((2, 32), dtype)
        if self.random.random() < 0.7:
            made.step()
        states = made.state
        if self.random.random() < 0.6 and states:
            param = self.random.choice(list(states))
            name = self.random.choice(list(states[param]) or ["step"])
            states[param][name] = self.changed(states[param].get(name))
        if self.random.random() < 0.3:
            param = self.random.choice(params)
            param.grad = self.changed_tensor(param)
        group = made.param_groups[0]
        if self.random.random() < 0.3:
            name = self.random.choice(list(group))
            group[name] = self.changed(group[name])
        return made, [rules_of(kind)[0]], made.param_groups, states

    def step_of_optimizer(self) -> None:
        made, *_ = self.optimizer()
        act = self.random.choice(["step", "init_state", "state_dict", "memory_report", "load"])
        if act == "load":
            made.load_state_dict(made.state_dict())
        else:
            getattr(made, act)()

    def step_of_stepper(self) -> None:
        made, rules, groups, states = self.optimizer()
        arguments: Arguments = {"rules": rules, "groups": groups, "states": states}
        stepper = made._stepper.native
        act = self.random.choice(["step", "measure", "decide", "init_states", "bucket"])
        if act == "decide":
            given = {
                "device": torch.device("cpu"),
                "totals": [self.doubles(3) for _ in range(self.random.choice([0, 1, 2]))],
                "scale": self.maybe(self.tensor((1,))),
            }
            stepper.log.decide(**self.changed(given))
            stepper.log.newest(True)
            return
        if act == "init_states":
            _C.init_states(**self.changed(arguments))
            return
        info = _C.GroupInfo(set(made.defaults), {})
        if act == "bucket":
            param = made.param_groups[0]["params"][0]
            arguments |= {
                "param": param,
                "group": 0,
                "tensor_index": 0,
                "label": "w",
                "info": info,
            }
            bucket = _C.Bucket(**(self.changed(arguments)))
            total = self.changed(self.doubles(3))
            bucket.step(
                groups, self.maybe(bucket.measure()), self.maybe(2.0), 1.0, self.maybe(total)
            )
            return
        arguments["info"] = info
        gathered = stepper.gather(**self.changed(arguments))
        if act == "measure":
            stepper.measure(gathered).totals()
            return
        given = {
            "scale": self.maybe(self.tensor((1,))),
            "found_inf": self.maybe(self.tensor((1,))),
            "measure": True,
        }
        inputs = _C.StepInputs(**self.changed(given))
        asked = {
            "max_norm": self.maybe(1.0),
            "scale_update": self.maybe(self.scale_update()),
        }
        asked = self.changed(asked)
        for name, value in asked.items():
            setattr(inputs, name, value)
        limit = _C.NormLimit(1.0, sigmas=6.0, window=16.0)
        given = {
            "gathered": gathered,
            "groups": groups,
            "inputs": inputs,
            "checks": True,
            "max_norm": self.maybe(1.0),
            "limit": self.maybe(limit),
        }
        stepper.step(**self.changed(given))
        stepper.log.newest(True)

    def plain_call(self) -> Call:
        low = self.tensor((2, 32), torch.bfloat16)
        name = self.random.choice(FORMATS)
        row = next(row for row in _C.formats() if row["name"] == name)
        count = 64 // row["group"] if row["second_dtype"] and row["group"] > 1 else 64
        second = None if row["second_dtype"] is None else self.tensor((count,), row["second_dtype"])
        data = self.tensor((64,), row["dtype"])
        lists = [self.tensor((2, 32)), self.tensor((5,), torch.float16)]
        like = [self.tensor((2, 32), torch.bfloat16), self.tensor((5,))]
        remainder = self.tensor((2, 32), torch.int16)
        record = _C.weight_at(low)
        indices = torch.tensor([3, 5])
        param = self.tensor((2, 32))
        _, rules, groups, states = self.optimizer()
        saved = {"exp_avg": self.tensor((2, 32)), "step": self.doubles()}
        files = [{"params": list(range(len(group["params"])))} for group in groups]
        found = {0: saved, **dict(enumerate(states.values()))}
        state_dict = {"state": found, "param_groups": files}
        held = {"master": self.tensor((2, 32))}
        calls: list[Call] = [
            (_C.measure, {"tensors": lists}),
            (_C.combine, {"rows": self.doubles(3, 3)}),
            (_C.copy_, {"to": lists, "from_": like, "verdict": self.doubles(5)}),
            (
                _C.average_,
                {
                    "to": [low, lists[0]],
                    "to_masters": [remainder, None],
                    "from_": [self.tensor((2, 32)), like[0]],
                    "from_masters": [None, self.tensor((2, 32))],
                    "decay": 0.9,
                },
            ),
            (
                _C.update_scale_,
                {
                    "update": self.scale_update(),
                    "found_inf": self.doubles(1),
                    "max_abs": self.doubles(1),
                },
            ),
            (_C.decode, {"data": data, "second": second, "format": name}),
            (_C.encode, {"values": self.tensor((2, 32)), "format": name}),
            (_C.copy_as, {"value": param, "dtype": torch.bfloat16, "local": low}),
            (record.store, {"param": low, "values": param, "exactly": True}),
            (record.state, {"param": low}),
            (
                record.set_state,
                {"param": low, "state": (remainder, indices, lists[0][0, :2], 0, True, True)},
            ),
            (_C.note_gradients, {"params": [low, param], "scale": 2.0}),
            (_C.gradient_scales, {"params": [low, param]}),
            (_C.unwritten_gradients, {"params": [low, param]}),
            (_C.forget_gradients, {"params": [low]}),
            (_C.first_masters, {"params": [low]}),
            (_C.adopt_masters, {"params": [low], "masters": [param]}),
            (_C.follow_masters, {"params": [low], "masters": [param]}),
            (_C.round_masters, {"params": [low], "masters": [param]}),
            (_C.take_over_masters, {"params": [low], "masters": [param]}),
            (_C.written_masters, {"params": [low]}),
            (_C.round_written_masters, {"params": [low]}),
            (_C.masters_beside, {"params": [low, param], "stepping": [True, False]}),
            (_C.put_entries, {"groups": groups, "states": states, "takes": True}),
            (_C.weight_states, {"params": [low, param]}),
            (_C.set_weight_states, {"params": [low], "states": [None]}),
            (_C.release_weights, {"params": [low]}),
            (_C.has_groups, {"format": self.random.choice(FORMATS), "param": param}),
            (_C.second_shape, {"format": "m8", "param": param, "part": [1, 32]}),
            (_C.check_weights, {"weights": lists, "names": ["a", "b"]}),
            (
                _C.restored,
                {
                    "entries": _C.SavedEntries(rules),
                    "groups": groups,
                    "state_dict": state_dict,
                    "seed": 0,
                },
            ),
            (_C.decoded_states, {"rule": rules[0], "param": param, "state": saved}),
            (_C.scalar_on, {"device": torch.device("cpu"), "number": self.tensor((1,))}),
            (
                _C.decide,
                {
                    "device": torch.device("cpu"),
                    "totals": [self.doubles(1, 3), self.doubles(2, 3)],
                    "scale": self.tensor((1,)),
                    "max_norm": 1.0,
                },
            ),
            (_C.Measurement, {"rows": self.doubles(3, 3)}),
            (
                _C.accumulate_weight_grad_,
                {
                    "grad_weight": self.tensor((4, 8)),
                    "grad_output": self.tensor((3, 4), torch.bfloat16),
                    "input": self.tensor((3, 8), torch.bfloat16),
                },
            ),
            (_C.accumulates, {"leaf": param}),
            (_C.used_on_current_stream, {"tensors": lists}),
            (_C.param_label, {"group": {"param_names": ["a"]}, "number": 0, "position": 0}),
            (_C.StepReports, {"device": torch.device("cpu")}),
            (_C.Gemm, {"library": "libno.so"}),
            (_C.casting.set_policy, {"device": "cpu", "op": "aten::mm", "policy": "stock"}),
            (_C.casting.policies, {"device": "cpu"}),
            (_C.float32_of, {"param": low, "stepping": self.random.random() < 0.5}),
            (_C.master_values, {"weight": low, "entries": held}),
            (_C.take_entries, {"params": [low], "states": [held]}),
        ]
        return self.random.choice(calls)

    def step_of_function(self) -> None:
        try:
            function, arguments = self.random.choice([self.plain_call, lambda: list_call(self)])()
        except AttributeError as error:
            raise WrongCall from error
        changes = self.random.choice([0, 1, 1, 2])
        for _ in range(changes):
            arguments = self.changed(arguments)
        if isinstance(arguments, dict):
            try:
                function(**arguments)
            except TypeError as error:
                if changes == 0 and "incompatible" in str(error):
                    raise WrongCall from error
                raise

    def run(self) -> None:
        """Raises where anything but an error by a plain Python exception has happened."""
        act = self.random.choice(
            [self.step_of_optimizer, self.step_of_stepper, *2 * [self.step_of_function]]
        )
        with contextlib.suppress(*ALLOWED):
            act()
        self.check_guards()


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first, count = map(int, sys.argv[1:])
    for number in range(first, first + count):
        print(number, flush=True)
        Fuzz(number).run()
