#!/usr/bin/env bash
# On a machine with a GPU, with the python3, torch and CUDA that are there and no network.
#
#   gpu.sh           everything, what decides the most first, in less than 27 minutes
#   gpu.sh tests     bits, waits and launches, all other tests; like the next two, less than 10 minutes
#   gpu.sh bench     the benchmark
#   gpu.sh sanitize  memcheck and racecheck
#
# Each builds the library for this GPU if that has not been done. A failing step does not stop those
# after it, except the build. GPU_SECONDS is the limit for all of a call; what does not fit is told.
#
# A step's output is in build/gpu/STEP.log; the end of a failing one's is printed, and the verdict last.
# The results go to benchmarks/results/GPU.json after every step and every figure; figures of an
# earlier call stay there. With OUT set, copies of it, the picture and all logs go to that folder
# after every step. The libraries of build/peers (make gpu-peers) are found.
set -uo pipefail
part=${1:-all}
case $part in
  all) total=1600 steps='bits host_waits bench_key cuda_tests bench memcheck racecheck other_tests' ;;
  tests) total=530 steps='bits host_waits cuda_tests other_tests' ;;
  bench) total=540 steps='bench' ;;
  sanitize) total=540 steps='memcheck racecheck' ;;
  *) echo "gpu.sh: expected tests, bench, sanitize or nothing, found $part" >&2; exit 2 ;;
esac
total=${GPU_SECONDS:-$total}
[[ $total =~ ^[0-9]+$ ]] || { echo "GPU_SECONDS: expected whole seconds, found $total" >&2; exit 2; }

callers=
IFS=: read -ra folders <<<"${PYTHONPATH:-}"
for folder in ${folders[@]+"${folders[@]}"}; do  # relative ones are the caller's
  [ -n "$folder" ] && callers+=:$(realpath -m -- "$folder")
done
[ -n "${OUT:-}" ] && OUT=$(realpath -m -- "$OUT")
cd "$(dirname "$0")/../.." || exit 1
[ -d build/peers ] && callers+=:$PWD/build/peers
python=${PYTHON:-python3}
logs=build/gpu
export PYTHONPATH=$PWD/python:$PWD/tests/support$callers PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # several processes share the cores
mkdir -p "$logs" || exit 1
rm -f "$logs/parts.tsv" "$logs/lost_device.log"

if ! "$python" benchmarks/gpu/gpu_environment.py --json "$logs/environment.json" \
  >"$logs/environment.log" 2>"$logs/environment.err"; then
  cat "$logs/environment.log" "$logs/environment.err" >&2
  exit 1
fi
cat "$logs/environment.log"
summary=("$python" benchmarks/gpu/gpu_summary.py "$logs" ${OUT:+--out "$OUT"})
# shellcheck disable=SC2086
"${summary[@]}" plan build $steps || exit 1

ended=0
finish() {  # says what is known, also when interrupted
  [ "$ended" = 1 ] && return
  ended=1
  "${summary[@]}" finish
}
trap finish EXIT
child=
trap '[ -n "$child" ] && kill "$child"; exit 130' INT TERM

step() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS status=0 left=$((total - SECONDS))
  shift 2
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    status=skipped
  else
    echo "== $name, at most $limit s"
    timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 </dev/null &
    child=$!
    wait "$child" || status=$?
    child=
  fi
  "${summary[@]}" record "$name" "$((SECONDS - start))" "$status"
  [ "$status" = 0 ]
}

has() { "$python" -c "import $1" 2>/dev/null; }

# Several processes share the GPU. One whose device a kernel has made unusable ends, and another
# takes its place (tests/conftest.py); --timeout-method=thread ends one that a kernel holds.
export AMP_MP_LOST_DEVICE=$PWD/$logs/lost_device.log
pytest() {  # NAME SECONDS PROCESSES ARGUMENTS...
  local name=$1 limit=$2 processes=$3 left=$((total - SECONDS))
  shift 3
  [ "$limit" -gt "$left" ] && limit=$left
  local command=("$python" -m pytest -q -p no:cacheprovider --tb=short --continue-on-collection-errors)
  if has pytest_timeout; then
    command+=(--timeout=90 --session-timeout=$((limit * 17 / 20)))
  else  # pyproject.toml's settings for it would be errors
    command+=(-o 'addopts=-ra --strict-markers --import-mode=importlib')
  fi
  if [ "$processes" -gt 1 ] && has xdist; then
    command+=(-n "$processes" --max-worker-restart=20)
    has pytest_timeout && command+=(--timeout-method=thread)
  fi
  step "$name" "$limit" ${WATCHED[@]+"${WATCHED[@]}"} "${command[@]}" "$@"
}
WATCHED=()

# A tool that finds an error exits with 9. Few tests: every instruction of every kernel is watched.
# Without torch's cache every tensor is an allocation of its own, whose ends the tool knows.
sanitize() {  # TOOL
  local subset='cuda and (every_preset and bfloat16 and (adamw or lamb) or one_bad_element and nan'
  subset+=' or rule_equals and unaligned and float16-bfloat16 and adamw or ieee)'
  if ! command -v compute-sanitizer >/dev/null; then
    "${summary[@]}" record "$1" 0 absent
    return
  fi
  WATCHED=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9)
  pytest "$1" 175 1 -p no:xdist -k "$subset" \
    tests/optim/step/test_rules.py tests/optim/step/test_measure.py tests/formats/test_formats.py
  WATCHED=()
}

bench() {  # NAME SECONDS ARGUMENTS...; it ends by itself before its time is over
  local name=$1 limit=$2 left=$((total - SECONDS))
  shift 2
  [ "$limit" -gt "$left" ] && limit=$left
  step "$name" "$limit" "$python" benchmarks/gpu/gpu_step.py \
    --seconds $((limit > 40 ? limit - 20 : limit / 2)) "$@"
}

# Where the CPU's bits are the expected ones, or a formula's in NumPy.
bits=(tests/optim/step/test_quotients.py tests/optim/step/test_rules.py
  tests/optim/step/test_measure.py tests/formats/test_formats.py)
others=(--ignore=tests/emulators --ignore=tests/project --ignore=tests/benchmarks)

run() {
  case $1 in
    bits) pytest bits 90 6 -k cuda "${bits[@]}" ;;
    host_waits)
      step host_waits 60 "$python" benchmarks/gpu/gpu_syncs.py --json "$logs/host_waits.json" ;;
    bench_key) bench bench_key 240 --key ${AGAIN:+--again} ;;
    bench)  # after bench_key it goes on
      [ "$part" = bench ] || AGAIN=
      bench bench 500 ${AGAIN:+--again} ;;
    cuda_tests)  # left out: what runs the kernels on the CPU, and what builds the library once more
      pytest cuda_tests 150 6 -k cuda "${others[@]}" "${bits[@]/#/--ignore=}" ;;
    memcheck | racecheck) sanitize "$1" ;;
    other_tests)  # this torch and Python may be untested; left out: whole training runs
      pytest other_tests 150 12 -k 'not cuda' "${others[@]}" --ignore=tests/examples \
        --ignore=tests/casting/test_casting_distributed.py ;;
  esac
}

build=200
[ "$part" = bench ] || [ "$part" = sanitize ] && build=180  # the rest is promised to what comes
step build "$build" "$python" benchmarks/gpu/gpu_build.py "$logs/environment.json" \
  "$logs/built.json" || exit 1
for name in $steps; do run "$name"; done

finish
exit $?
