#!/usr/bin/env bash
# make gpu: one go on a machine with a GPU, with the python3, torch and CUDA that are there and no
# network, in less than 8 minutes: build for this GPU, the tests on it, waits of the host, the
# benchmark, sanitizers, the other tests. A failing part does not stop the ones after it.
#
# Each part's output is in build/gpu/PART.log; the end of a failing one's is printed, and the verdict
# last. The figures go to benchmarks/results/GPU.json and .png; with OUT set, copies of them and of
# all logs go there.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
logs=build/gpu
total=465  # seconds for everything
export PYTHONPATH=$PWD/python:$PWD/tests/support PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # several processes share the cores
rm -rf "$logs" && mkdir -p "$logs" || exit 1

ended=0
finish() {  # copies what there is, also when interrupted
  [ "$ended" = 1 ] && return
  ended=1
  "$python" benchmarks/gpu/gpu_summary.py "$logs" benchmarks/results ${OUT:+--out "$OUT"}
}
trap finish EXIT

part() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS status=0 left=$((total - SECONDS))
  shift 2
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    printf '%s\t0\tskipped\n' "$name" >>"$logs/parts.tsv"
    return 1
  fi
  echo "== $name, at most $limit s"
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 </dev/null || status=$?
  printf '%s\t%s\t%s\n' "$name" "$((SECONDS - start))" "$status" >>"$logs/parts.tsv"
  return "$status"
}

show() {  # what answers, or that it is not there
  "$@" 2>/dev/null || echo "no answer: $*"
}

{
  show nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader
  show "$python" -c 'import platform, setuptools, torch
print("python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda,
      "setuptools", setuptools.__version__, "GPU seen by torch:", torch.cuda.is_available())'
  show "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" --version | tail -n 2
  show "${CXX:-g++}" --version | head -n 1
  echo "$(nproc) cores"
} 2>&1 | tee "$logs/environment.log"

capability=$("$python" -c 'import torch
print("%d.%d" % torch.cuda.get_device_capability())' 2>/dev/null)
if [ -z "$capability" ]; then
  echo 'make gpu: torch finds no GPU here' >&2
  exit 1
fi

part build 150 env AMP_MP_CUDA=1 TORCH_CUDA_ARCH_LIST="$capability" MAX_JOBS="${MAX_JOBS:-16}" \
  "$python" setup.py --quiet build_ext --inplace || exit 1

# Several processes share the GPU. One whose device a kernel has made unusable ends, and another
# takes its place (tests/conftest.py); --timeout-method=thread ends one that a kernel holds.
export AMP_MP_LOST_DEVICE=$PWD/$logs/lost_device.log
tests=("$python" -m pytest -q -p no:cacheprovider --durations=15 --tb=short --timeout=90)
"$python" -c 'import xdist' 2>/dev/null && workers=1 || workers=0
spread() { [ "$workers" = 1 ] && echo "-n $1 --max-worker-restart=20 --timeout-method=thread"; }

# On the GPU. Left out: what runs the kernels on the CPU, and what builds the library once more.
# shellcheck disable=SC2046
part cuda_tests 120 "${tests[@]}" $(spread 6) --session-timeout=100 -k cuda \
  --ignore=tests/emulators --ignore=tests/project/test_build.py

part host_waits 40 "$python" benchmarks/gpu/gpu_syncs.py --json "$logs/host_waits.json"
part benchmark 175 "$python" benchmarks/gpu/gpu_step.py --seconds 145

# A tool that finds an error exits with 9. Few tests: every instruction of every kernel is watched.
# Without torch's cache every tensor is an allocation of its own, whose ends the tool knows.
subset='cuda and (every_preset and bfloat16 and (adamw or lamb) or one_bad_element and nan'
subset+=' or rule_equals and unaligned and float16-bfloat16 and adamw or ieee)'
for tool in memcheck racecheck; do
  if command -v compute-sanitizer >/dev/null; then
    part "$tool" 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" \
      --error-exitcode 9 "$python" -m pytest -q \
      -p no:cacheprovider -p no:xdist --timeout=0 --session-timeout=40 -k "$subset" \
      tests/optim/step/test_rules.py tests/optim/step/test_measure.py tests/formats/test_formats.py
  else
    printf '%s\t0\tabsent\n' "$tool" >>"$logs/parts.tsv"
  fi
done

# With what time is left, the rest: this torch and Python may be untested. Left out:
# documentation, whole training runs, other processes' builds.
left=$((total - SECONDS))
[ "$left" -gt 110 ] && left=110
# shellcheck disable=SC2046
part other_tests "$left" "${tests[@]}" $(spread 12) --session-timeout=$((left * 8 / 10)) \
  -k 'not cuda' --ignore=tests/project --ignore=tests/examples --ignore=tests/benchmarks \
  --ignore=tests/emulators --ignore=tests/casting/test_casting_distributed.py

finish
exit $?
