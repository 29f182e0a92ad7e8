#!/usr/bin/env bash
# make gpu: one go on a machine with a GPU, with the python3, torch and CUDA that are there and no
# network: build for this GPU, run every test, check memory and races, run the benchmarks. A failing
# part does not stop the ones after it; the summary and the exit status tell.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1
summary=()

part() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name"
  timeout "$limit" "$@"
  local status=$?
  summary+=("$(printf '%-12s %4d s  %s' "$name" $((SECONDS - start)) \
    "$([ $status = 0 ] && echo passed || echo "FAILED (exit $status)")")")
  return $status
}

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr ' ' '-')
if [ -z "$capability" ]; then
  echo 'make gpu: nvidia-smi finds no GPU here' >&2
  exit 1
fi

failed=0
part build 120 env AMP_MP_CUDA=1 TORCH_CUDA_ARCH_LIST="$capability" \
  "$python" setup.py --quiet build_ext --inplace || exit 1
part tests 180 "$python" -m pytest -q -k 'not build_without_cuda and not cuda_on_cpu' || failed=1
if command -v compute-sanitizer >/dev/null; then
  subset='cuda and (aligned and adamw and bfloat16-bfloat16 or one_bad_element or ieee)'
  for tool in memcheck racecheck; do
    part "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$python" -m pytest -q -p no:cacheprovider tests/test_rules.py tests/test_measure.py \
      tests/test_formats.py -k "$subset" || failed=1
  done
fi
part benchmark 120 "$python" benchmarks/step.py --device cuda --json "benchmarks/results/$gpu.json" \
  || failed=1
echo "== $gpu, $("$python" -c 'import torch; print("torch", torch.__version__)')"
printf '%s\n' "${summary[@]}"
exit $failed
