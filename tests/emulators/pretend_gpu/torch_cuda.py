"""What of torch.cuda is Python, for the pretend GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import amp_mp_pretend_gpu as native
import torch
from pretend_gpu.build import CUDA, build_cublas
from pretend_gpu.device import CUDAGraph, graph

MEMORY = 1 << 30  # what tests are told is free: those that need more are left out


class Event(torch.Event):
    """torch.cuda.Event, which a build of torch without CUDA does not have."""

    def __new__(cls, enable_timing: bool = False, **_: object) -> Event:
        return super().__new__(cls, device=torch.device("cuda"), enable_timing=enable_timing)


class Stream(torch.Stream):
    """torch.cuda.Stream, which a build of torch without CUDA does not have."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
        if known:  # stream_id, device_index and device_type
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", _index(device)))

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


def _stream(number: int, device: int) -> Stream:
    cuda = torch._C._autograd.DeviceType.CUDA.value
    return Stream(stream_id=number, device_index=device, device_type=cuda)


def _current_stream(device: Any = None) -> Stream:
    return _stream(native.current_stream(_index(device)), _index(device))


def _default_stream(device: Any = None) -> Stream:
    return _stream(0, _index(device))


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        native.set_device(stream.device_index)
        native.exchange_stream(stream.device_index, stream.stream_id)


@contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    device = int(native.current_device())
    before = None if stream is None else _current_stream(stream.device)
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)
        native.set_device(device)


def _synchronize(device: Any = None) -> None:
    native.note_sync("torch.cuda.synchronize")
    native.finish_device(_index(device))


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
    cublas = ctypes.CDLL(str(build_cublas()), mode=ctypes.RTLD_GLOBAL)  # as torch for CUDA has it
    # Its products run at their call, behind what their stream has already.
    ctypes.c_void_p.in_dll(cublas, "before").value = native.settle_address()
    # The kernels of attention that a torch for CUDA has: without them it is products and a softmax.
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
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
        # Another function: torch.compile keeps what it knows of each under the function itself.
        "_maybe_exchange_device": lambda device: _exchange_device(device),
        "synchronize": _synchronize,
        "Event": Event,
        "Stream": Stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "stream": _use_stream,
        "set_stream": _set_stream,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "is_current_stream_capturing": native.is_capturing,
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
