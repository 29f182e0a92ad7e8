"""benchmarks/gpu/gpu_step.py: all of it on the CPU with tiny lists; its lists, bytes and counts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks/gpu"

import gpu_report  # noqa: E402
import gpu_syncs  # noqa: E402
from gpu_counts import LABEL, count, counted  # noqa: E402
from gpu_lists import ShapeList, llama_shapes, parameters, shape_lists  # noqa: E402
from gpu_peers import KEY, candidates  # noqa: E402
from gpu_timing import copies_needed  # noqa: E402

# ---- the whole, quickly --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the quick mode fills, and what it prints."""
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCHMARKS / "gpu_step.py"), "--device", "cpu", "--quick"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("gpu_benchmark")
def test_quick_mode_times_every_candidate_on_every_list(quick: tuple[Path, str]) -> None:
    content = json.loads((quick[0] / "cpu.json").read_text())
    assert content["torch"] == torch.__version__
    assert content["build"]["torch"] == torch.__version__
    assert list(content["lists"]) == ["one", "llama", "resnet50", "many"]
    for shapes in shape_lists(quick=True):
        found = content["lists"][shapes.key]
        assert found["ceilings"].keys() >= {"copy", "read", "in place", "link"}
        wanted = candidates(shapes, "cpu", others=False)
        assert list(found["candidates"]) == [c.name for c in wanted]
        for candidate in wanted:
            entry = found["candidates"][candidate.name]
            assert "error" not in entry, (shapes.key, candidate.name, entry)
            assert entry["ms"] > 0
            first, third = entry["ms_quartiles"][::2]
            assert first <= entry["ms"] <= third
            assert entry["bytes"] == candidate.moved(shapes)
            assert entry["gb_s"] == pytest.approx(entry["bytes"] / entry["ms"] / 1e6)
            assert entry["waits"] == 0
            assert ("link_gb_s" in entry) == ("offload" in candidate.name)
    assert content["targets"] == gpu_report.as_dicts(gpu_report.targets(content["lists"]))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("gpu_benchmark")
def test_quick_mode_draws_and_ends_with_the_targets(quick: tuple[Path, str]) -> None:
    picture = (quick[0] / "cpu.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    targets = json.loads((quick[0] / "cpu.json").read_text())["targets"]
    last = quick[1].splitlines()[-len(targets) :]
    for line, target in zip(last, targets, strict=True):
        assert line.startswith(target["what"])
        assert line.endswith(target["verdict"])


# ---- lists and bytes -----------------------------------------------------------------------------


def test_lists_have_the_models_real_sizes() -> None:
    one, llama, resnet, many = shape_lists()
    assert (len(one.shapes), one.elements) == (1, 10**9)
    assert (len(llama.shapes), llama.elements) == (75, 1_881_214_976)
    assert (len(resnet.shapes), resnet.elements) == (161, 25_557_032)
    assert (len(many.shapes), many.elements) == (2000, 2_000_000)
    assert resnet.shapes[:2] == ((64, 3, 7, 7), (64,))
    assert resnet.shapes[-2:] == ((1000, 2048), (1000,))
    assert resnet.shapes.count((512, 512, 3, 3)) == 3
    assert llama.shapes.count((11008, 4096)) == 16
    whole = llama_shapes(layers=32)
    assert (len(whole), sum(map(math.prod, whole))) == (291, 6_738_415_616)


def test_parameters_are_bfloat16_with_scaled_gradients() -> None:
    shapes = ShapeList("x", "x", ((100, 100),), True)
    (param,) = parameters(shapes, "cpu", 1024.0)
    assert param.grad is not None
    assert (param.dtype, param.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert param.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert param.grad.float().std().item() == pytest.approx(1.024, rel=0.05)


def test_bytes_are_what_each_one_moves() -> None:
    def moved(*sizes: int) -> dict[str, float]:
        shapes = ShapeList("x", "x", tuple((n,) for n in sizes), False)
        return {c.name: c.moved(shapes) for c in candidates(shapes, "cuda", others=True)}

    assert moved(1_000_000) == {
        "torch fused": 60e6,
        "amp_mp exact": 28e6,
        "amp_mp tiny": 16.125e6,
        "amp_mp lean": 18e6,
        "amp_mp micro": 14.1875e6,
        "amp_mp nano": 13.1875e6,
        "amp_mp float32": 32e6,
        "amp_mp measure bfloat16": 2e6,
        "amp_mp measure float16": 2e6,
        "amp_mp measure float32": 4e6,
        "amp_mp exact, overflow": 2e6,
        "amp_mp exact, graph": 28e6,
        "amp_mp tiny, graph": 16.125e6,
        "flashoptim 24-bit": 18.25e6,
        "flashoptim 32-bit, unquantised": 24e6,
        "optimi, Kahan": 24e6,
        "bitsandbytes 8-bit": 16.0625e6,
        "torchao 8-bit": 20e6,  # not a multiple of 256
        "torch foreach": 112e6,
        "torch bfloat16, no masters": 20e6,
    }
    assert moved(4096)["torchao 8-bit"] == 16.0625 * 4096
    assert moved(4095)["bitsandbytes 8-bit"] == (2 + 4 + 16 + 6) * 4095
    assert moved(4096, 4095)["torch fused"] == 60 * 8191


def test_graphs_are_for_small_lists_on_a_gpu_only() -> None:
    def graphs(key: str, device: str) -> int:
        shapes = next(s for s in shape_lists(quick=True) if s.key == key)
        return sum("graph" in c.name for c in candidates(shapes, device, others=True))

    assert (graphs("many", "cuda"), graphs("one", "cuda"), graphs("many", "cpu")) == (2, 0, 0)


def test_steps_that_note_changes_come_early_and_say_what_it_costs() -> None:
    """A bit a weight more, each way; on large lists alone."""

    def found(key: str) -> list[tuple[str, float]]:
        shapes = next(s for s in shape_lists(quick=True) if s.key == key)
        every = [c for c in candidates(shapes, "cuda", others=True) if c.name not in KEY]
        return [(c.name, c.moved(shapes) / shapes.elements) for c in every[:3]]

    assert found("llama") == [
        ("amp_mp exact, changes", 28.25),
        ("amp_mp lean", 18),
        ("amp_mp lean, changes", 18.25),
    ]
    assert not any("changes" in name for name, _ in found("many"))
    figures = {"copy_gb_s": 2000.0}
    entries = {
        "amp_mp exact": {"ms": 10.0, **figures},
        "amp_mp exact, changes": {"ms": 10.2, **figures},
        "amp_mp lean, changes": {"ms": 7.0, **figures},  # of which there is no step without
    }
    (line,) = gpu_report.changes_lines({"candidates": entries})
    assert line.endswith("amp_mp exact, changes: 1.020 times the time of amp_mp exact")


def test_offloaded_steps_say_whether_staging_is_worth_building() -> None:
    """lean sends remainder, moment and square, 5 bytes, each way; small lists are not offloaded."""

    def links(key: str) -> dict[str, float]:
        shapes = next(s for s in shape_lists(quick=True) if s.key == key)
        found = [c for c in candidates(shapes, "cuda", others=True) if "offload" in c.name]
        return {c.name: c.link(shapes) / shapes.elements for c in found}

    assert links("one") == {"amp_mp lean, offload": 10, "amp_mp exact, offload": 20}
    assert links("many") == {}
    entry = {"ms": 400.0, "link_gb_s": 25.0, "copy_gb_s": 2000.0}
    entries = {"amp_mp lean": {"ms": 9.0}, "amp_mp lean, offload": entry}
    for link, worth in ((40.0, "is not worth building"), (50.0, "is worth building")):
        (line,) = gpu_report.offload_lines({"ceilings": {"link": link}, "candidates": entries})
        assert "0.400 s, 25.0 GB/s" in line
        assert "0.009 s" in line
        assert line.endswith(worth)


def test_a_rotation_passes_three_caches() -> None:
    assert copies_needed(4e6, 50_000_000) == 38
    assert copies_needed(150e6, 50_000_000) == 1
    assert copies_needed(149e6, 50_000_000) == 2
    assert copies_needed(10, 50_000_000) == 40


# ---- counting ------------------------------------------------------------------------------------


def call(name: str, ts: float, correlation: int, cat: str = "cuda_runtime") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 1, "args": args}


REGION = {"ph": "X", "cat": "user_annotation", "name": LABEL, "ts": 100, "dur": 50}
KERNEL = "void amp_mp::cuda::(anonymous namespace)::apply<amp_mp::AdamW, (int)3>(Table<4>, int)"


def test_kernels_and_waits_inside_the_region_are_counted() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        REGION,
        call("cudaLaunchKernel", 90, 1),  # before
        call("cudaLaunchKernel", 101, 2),
        call("cudaLaunchKernelExC", 102, 3),
        call("cuLaunchKernel", 103, 4, "cuda_driver"),
        call("cudaMemcpyAsync", 104, 5),
        call("cudaMemsetAsync", 105, 6),
        call("cudaStreamSynchronize", 106, 7),
        call("cudaDeviceSynchronize", 151, 8),  # after
        call(KERNEL, 80, 1, "kernel"),
        call(KERNEL, 200, 2, "kernel"),  # runs later, but was launched inside
        call(KERNEL, 201, 3, "kernel"),
        call("triton_step", 202, 4, "kernel"),
        call("Memcpy DtoH (Device -> Pageable)", 203, 5, "gpu_memcpy"),
        call("Memset (Device)", 204, 6, "gpu_memset"),
    ]
    (found,) = counted(events)
    assert found.launches == 5
    assert found.kernels == {"amp_mp::cuda::apply": 2, "triton_step": 1}
    assert found.kernel_us == {"amp_mp::cuda::apply": 2.0, "triton_step": 1.0}
    assert (found.waits, found.to_host) == (1, 1)
    later = [{**e, "ts": e["ts"] + 1000} for e in events if e.get("ts", 0) in (100, 101)]
    later[1] = call("cudaLaunchKernel", 1101, 9)
    again = [*events, *later, {**call(KERNEL, 1200, 9, "kernel"), "dur": 2.5}]
    assert counted(again, 2)[0] == found
    assert counted(again, 2)[1].kernel_us == {"amp_mp::cuda::apply": 2.5}


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaStreamSynchronize", 1),
        ("cudaEventSynchronize", 1),
        ("cuCtxSynchronize", 1),
        ("cudaMemcpy", 1),
        ("cuMemcpyDtoH_v2", 1),
        ("cudaMemcpyAsync", 0),
        ("cuMemcpyDtoHAsync_v2", 0),
        ("cudaStreamWaitEvent", 0),
        ("cudaStreamIsCapturing", 0),
    ],
)
def test_what_keeps_the_host_is_a_wait(name: str, waits: int) -> None:
    assert counted([REGION, call(name, 101, 2)])[0].waits == waits


def test_a_trace_without_the_region_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 regions"):
        counted([call("cudaLaunchKernel", 101, 2)])


def test_a_real_trace_has_its_region() -> None:
    ran = []
    found = count("cpu", *3 * [lambda: ran.append(torch.ones(8).sum())])
    assert len(ran) == 3
    assert [each.launches for each in found] == [0, 0, 0]


@pytest.mark.parametrize("name", ["waits", "to_host", "step_launches"])
def test_one_wait_or_a_fourth_launch_is_too_much(name: str) -> None:
    counts = {"launches": 40, "waits": 0, "to_host": 0, "step_launches": 3}
    assert not gpu_syncs.too_much(counts)
    assert gpu_syncs.too_much({**counts, name: counts[name] + 1})


@pytest.mark.full
@pytest.mark.slow
def test_the_check_for_waits_runs(tmp_path: Path) -> None:
    path = tmp_path / "waits.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_syncs.py"), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--json", str(path)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(path.read_text())) == 11
