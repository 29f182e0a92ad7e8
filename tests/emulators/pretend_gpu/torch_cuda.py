"""What of torch.cuda is Python, for the pretend GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import amp_mp_pretend_gpu as native
import torch
from pretend_gpu.build import CUDA, build_cublas
from pretend_gpu.device import CUDAGraph, graph

MEMORY = 1 << 30  # what tests are told is free: those that need more are left out


class Event:
    """Everything has happened by the time it is recorded."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        native.note_sync("event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    """All streams are the default one: what is launched has run."""

    def __init__(self, device: Any = None, priority: int = 0, **_: object) -> None:
        self.device = torch.device("cuda", _index(device))
        self.cuda_stream = 0

    def synchronize(self) -> None:
        native.note_sync("stream.synchronize")

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)


def _index(device: Any) -> int:
    """The number of a device given in any of torch's ways; of the current one for None."""
    if device is None:
        return int(native.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(native.current_device()) if index is None else index


def _set_device(device: Any) -> None:
    native.set_device(_index(device))


def _exchange_device(device: int) -> int:
    before = int(native.current_device())
    if device >= 0:
        native.set_device(device)
    return before


def _maybe_exchange_device(device: int) -> int:
    return _exchange_device(device)


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="pretend GPU",
        major=8,
        minor=0,
        multi_processor_count=4,
        total_memory=MEMORY,
    )


def _new_storage(cls: type, *args: Any, **options: Any) -> Any:
    """torch.UntypedStorage(size, device="cuda"), which torch without CUDA refuses."""
    device = options.get("device")
    if device is None or torch.device(device).type != "cuda":
        return torch._C.StorageBase.__new__(cls, *args, **options)
    return torch.empty(*args or (0,), dtype=torch.uint8, device=device).untyped_storage()


def replace() -> None:
    """Put the pretend GPU's answers into torch.cuda."""
    torch._C._cuda_getDevice = native.current_device
    torch.UntypedStorage.__new__ = _new_storage
    torch.version.cuda = CUDA
    ctypes.CDLL(str(build_cublas()), mode=ctypes.RTLD_GLOBAL)  # as torch for CUDA has its own
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "default_generators": (torch.default_generator,) * native.device_count(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _maybe_exchange_device,
        "synchronize": lambda device=None: native.note_sync("torch.cuda.synchronize"),
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: None,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "is_current_stream_capturing": native.is_capturing,
        "graph_pool_handle": lambda: (0, 0),
        "current_blas_handle": lambda: 1,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": _properties,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        if not hasattr(cuda, name):
            raise RuntimeError(f"torch.cuda has no {name} any more: look what replaces it")
        setattr(cuda, name, answer)
