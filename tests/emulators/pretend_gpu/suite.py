"""The tests that run on the pretend GPU, and running them in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# The files that are run, with the least number of tests that have to pass in each: of those that
# need a GPU without what is marked `full`.
FILES = {
    "contract/test_any_order_of_calls": 1,
    "contract/test_parameters_that_moved": 120,
    "contract/test_weights_that_were_written": 370,
    "optim/backward/test_attach": 35,
    "optim/backward/test_attach_scaling": 11,
    "casting/test_cast_cache": 15,
    "casting/test_casting": 18,
    "checkpoint/test_cuda_saving": 2,
    "checkpoint/test_saving_beside_training": 1,
    "casting/test_cuda_cast_streams": 4,
    "contract/test_cuda_scripts_on_any_streams": 6,
    "grad_scaler/test_cuda_graph_splits": 15,
    "grad_scaler/test_cuda_stream_memory": 26,
    "optim/step/test_cuda_dropped_memory": 36,
    "casting/test_weight_writes": 18,
    "model/test_average_in_use": 30,
    "model/test_averaged_model": 30,
    "model/test_average_pass": 23,
    "model/test_changes": 300,
    "model/test_changes_in_any_order": 1,
    "model/test_changes_for_receivers": 11,
    "model/test_convert": 16,
    "model/test_float8": 75,
    "model/test_kept_modules": 36,
    "contract/test_whoever_steps": 1,
    "model/test_kept_masters": 280,
    "model/test_original_values": 40,
    "model/test_prepare": 65,
    "optim/muon/test_cuda_muon": 7,
    "optim/muon/test_models": 14,
    "optim/muon/test_muon": 36,
    "optim/step/test_cuda_changes": 16,
    "optim/step/test_cuda_first_step": 9,
    "optim/step/test_cuda_sharded_step": 33,
    "optim/step/test_cuda_captured_step": 28,
    "optim/step/test_cuda_step": 30,
    "optim/step/test_cuda_tables": 18,
    "optim/step/test_gathered_norms": 9,
    "optim/step/test_shard_origins": 150,
    "optim/step/test_steps_of_dtensors": 16,
    "wrappers/test_four_arms": 1,
    "wrappers/test_fp16_optimizer": 40,
    "wrappers/test_fp16_optimizer_overflow": 25,
    "wrappers/test_fp16_optimizer_snapshots": 33,
    "grad_scaler/test_grad_scaler": 120,
    "grad_scaler/test_cuda_streams": 25,
    "wrappers/test_handle": 26,
    "wrappers/test_handle_scaling": 55,
    "nn/test_linear_accumulate": 20,
    "nn/test_main_grads": 22,
    "optim/step/test_measure": 20,
    "grad_scaler/test_next_scale": 24,
    "optim/state/test_masters": 60,
    "optim/state/test_offload": 88,
    "optim/test_qk_clip": 20,
    "optim/step/test_cuda_edited_masters": 16,
    "optim/test_optim": 50,
    "optim/test_steps_of_nothing": 23,
    "optim/step/test_quotients": 8,
    "optim/step/test_rules": 400,
    "optim/state/test_compact_training": 10,
    "optim/state/test_resuming": 80,
    "optim/state/test_storage": 30,
    "optim/state/test_refused_state_dicts": 45,
    "optim/test_arguments": 80,
    "optim/test_compile": 18,
    "optim/step/test_skips": 35,
    "wrappers/test_fp16_optimizer_is_one": 110,
    "wrappers/test_scale_loss_loops": 65,
    "casting/test_apex_names": 12,
    "compat/test_layer_types": 165,
    "compat/test_layer_types_in_training": 34,
    "compat/test_layer_types_of_models": 80,
    "compat/test_openseq2seq": 20,
    "compat/test_typed_tensor": 48,
    "diagnose/test_histograms": 28,
    "diagnose/test_overflow_reports": 1,
    "diagnose/test_watch_gradients": 2,
    "formats/test_formats": 50,
    "model/test_prepare_inputs": 5,
    "model/test_selection": 11,
    "nn/test_nn": 85,
    "nn/test_nn_attention": 100,
    "optim/state/test_8bit_codes": 32,
    "optim/state/test_half_bytes": 27,
    "optim/state/test_state_dicts": 50,
    "optim/state/test_state_taken_away": 13,
    "wrappers/test_larc": 20,
    "optim/test_options_that_change": 16,
    "optim/test_lost_updates": 14,
    "scaling/test_policies": 13,
    "examples/test_experiments": 10,
}
ITSELF = {"emulators/pretend_gpu/of_device": 13, "emulators/pretend_gpu/of_streams": 13}
# Those that need a GPU: elsewhere they are not collected.
ON_A_GPU = [name for name in FILES if "/test_cuda_" in name or name == "optim/state/test_offload"]
# Those that are run again with delayed streams: what reports to the host, or is captured.
DELAYED = [
    "wrappers/test_fp16_optimizer",
    "wrappers/test_fp16_optimizer_overflow",
    "wrappers/test_fp16_optimizer_snapshots",
    "wrappers/test_handle",
    "wrappers/test_handle_scaling",
    "casting/test_cast_cache",
    "casting/test_cuda_cast_streams",
    "grad_scaler/test_grad_scaler",
    "grad_scaler/test_next_scale",
    "optim/backward/test_attach",
    "optim/backward/test_attach_scaling",
    "optim/muon/test_cuda_muon",
    "optim/step/test_cuda_captured_step",
    "optim/step/test_cuda_step",
    "optim/step/test_cuda_tables",
    "optim/step/test_measure",
    "optim/step/test_skips",
]
# What is left out, by a part of its name, and why.
LEFT_OUT = {
    "million": "a kernel's threads take turns: a second each",
    "10_000_steps": "ten thousand steps",
    "unaligned": "test_cuda_kernels.py has unaligned arrays of every format under every rule",
    "comes_to_rest": "thousands of steps",
    "second_moment_follows": "thousands of steps",
    "splits_of": "all numbers of a format",
    "split24_of": "all numbers of a format",
    "split32_of": "all numbers of a format",
    "split20_": "all numbers of a format",
    "count_on_average": "hundreds of steps",
    "two_to_the_31": "needs 6 GiB",
    "every_significand": "test_cuda_kernels.py divides under every rule",
    "replicas": "runs processes of its own, on the CPU",
    "every_kind_of_gradient": "one of them is sparse",
    "sparse": "torch's sparse kernels for CUDA have none for the CPU that could stand in",
    "recurrent": "nor have its fused recurrent cells",
}
CHOSEN = "(cuda or of_device or of_streams) and not (" + " or ".join(LEFT_OUT) + ")"


class SuiteFailedError(Exception):
    """Tests failed, or passed in fewer numbers than they should; the end of what they printed."""


def passed(*arguments: str, timeout: float = 1100, **environment: str) -> Counter[str]:
    """Runs tests on the pretend GPU; how many passed of each file, none having failed."""
    ours = {"AMP_MP_PRETEND_GPU": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ours, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        raise SuiteFailedError(done.stdout[-6000:] + done.stderr[-2000:])
    return Counter(re.findall(r"(\w+)\.py::.* PASSED", done.stdout))


def pass_in_numbers(
    names: Iterable[str], marked: str = "", timeout: float = 1100, **environment: str
) -> int:
    """Runs files; as many tests have to pass in each as FILES says. Returns how many passed.

    marked: which marks, as for pytest's -m.
    """
    paths = [f"tests/{name}.py" for name in names]
    found = passed(*paths, "-k", CHOSEN, "-m", marked, timeout=timeout, **environment)
    least = {**FILES, **ITSELF}
    short = {name: found[Path(name).name] for name in names if found[Path(name).name] < least[name]}
    if short:
        raise SuiteFailedError(f"fewer tests passed than FILES has: {short}")
    return found.total()
