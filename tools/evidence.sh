#!/usr/bin/env bash
# What CI cannot show, on a machine with a GPU: tools/evidence.sh [-o FOLDER] [PART ...]
#
# Parts, all by default, each for every family of kernels that the device runs:
#   suite        the tests marked gpu
#   fuzz         tests/ops/test_fuzz.py with 5,000 examples an op (the hypothesis profile nightly)
#   sanitizers   tests/cuda/test_sanitized.py under memcheck, racecheck and synccheck of compute-sanitizer
# Results are written to FOLDER/MACHINE/suite.json and fuzz.json after each family, logs to FOLDER/evidence.tgz; without -o they are written
# to benchmarks/results and build. Ends with 1 when something failed or did not run. Needs no network and no installation: any dmattn
# that Python can import (PYTHONPATH) will do, or WHEEL=dist/dmattn-....whl, which is unpacked, imported and named in the results.
# Other variables: PYTHON, DMATTN_COMMIT where git does not know it, FAMILIES="auto sm80", WORKERS, TOOLS="memcheck initcheck",
# LIMIT in seconds for each program.
set -uo pipefail
cd "$(dirname "$0")/.."
output=benchmarks/results archive=build/evidence.tgz
while getopts o: option; do
  [ "$option" = o ] || { sed -n '2,12s/^# \?//p' "$0"; exit 2; }
  output=$(realpath -m "$OPTARG") archive=$(realpath -m "$OPTARG")/evidence.tgz
done
shift $((OPTIND - 1))
parts=${*:-suite fuzz sanitizers}
for part in $parts; do
  [[ " suite fuzz sanitizers " == *" $part "* ]] || { echo "evidence: expected the parts suite, fuzz and sanitizers, got $part"; exit 2; }
done
if [ -z "${PYTHON:-}" ]; then PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
workers=${WORKERS:-$(($(nproc) < 10 ? $(nproc) : 10))}
tools=${TOOLS:-memcheck racecheck synccheck}
shards=4
logs=$(mktemp -d)
unpacked=$(mktemp -d)
trap 'rm -rf "$logs" "$unpacked"' EXIT
if [ -n "${WHEEL:-}" ]; then
  WHEEL=$(realpath "$WHEEL")
  "$PYTHON" -m zipfile -e "$WHEEL" "$unpacked" || exit 2
  export WHEEL PYTHONPATH=$unpacked
fi
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD/benchmarks
mkdir -p "$output" "$(dirname "$archive")"
able=$("$PYTHON" tools/evidence.py facts "$logs") || exit 2
families=${FAMILIES:-$able}
pytest=("$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -p no:benchmark -W ignore)

# logged NAME PROGRAM...: leaves NAME.log and NAME.exit, the exit status and seconds, in $logs.
logged() {
  local name=$1 began=$EPOCHREALTIME
  shift
  timeout "${LIMIT:-900}" "$@" >"$logs/$name.log" 2>&1
  echo "$? $began $EPOCHREALTIME" >"$logs/$name.exit"
}

suite() {
  OMP_NUM_THREADS=2 logged "suite-$1" "${pytest[@]}" -n "$workers" --durations 5 --junitxml "$logs/suite-$1.xml" tests
}

fuzz() {
  OMP_NUM_THREADS=2 HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-nightly} DMATTN_FUZZ_LOG=$logs/fuzz.json \
    logged "fuzz-$1" "${pytest[@]}" -n "$workers" --junitxml "$logs/fuzz-$1.xml" tests/ops/test_fuzz.py
  PYTHONPATH=$PYTHONPATH:$PWD/tests/support:$PWD/tests/cache "$PYTHON" tests/ops/test_fuzz.py "$logs/fuzz.json" >>"$logs/fuzz-$1.log" 2>&1
}

# A read past the end, on purpose: memcheck has to see our kernels at all.
planted='import torch, dmattn
q = torch.randn(1, 2, 300, 64, device="cuda").half()
mask = dmattn.IntervalMask.sliding_window(300, 9, device="cuda")
mask.end.untyped_storage().resize_(64)
dmattn.attention(q, q, q, mask)
torch.cuda.synchronize()'

# All shards of all tools run at once, one thread each.
sanitizers() {
  local tool shard only
  # Each tensor is an allocation of its own, so that a byte too far is seen.
  export OMP_NUM_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in $tools; do
    # initcheck has to see torch's kernels write; the others look at ours alone.
    only=(--kernel-name kernel_substring=dmattn)
    if [ "$tool" = initcheck ]; then only=(); fi
    for shard in $(seq $shards); do
      DMATTN_SANITIZER=$tool DMATTN_SHARD=$shard/$shards logged "sanitizers-$1-$tool-$shard" \
        compute-sanitizer --tool "$tool" "${only[@]}" --error-exitcode 99 --print-limit 20 \
        "${pytest[@]}" -p no:xdist --junitxml "$logs/sanitizers-$1-$tool-$shard.xml" tests/cuda/test_sanitized.py &
    done
  done
  logged "sanitizers-$1-planted" \
    compute-sanitizer --tool memcheck --kernel-name kernel_substring=dmattn --error-exitcode 99 "$PYTHON" -c "$planted" &
  wait
}

failed=0
for part in $parts; do
  for family in $families; do
    (export DMATTN_FAMILY=$family && "$part" "$family")
    "$PYTHON" tools/evidence.py record "$logs" "$output" "$part" "$family" || failed=1
    tar czf "$archive" -C "$logs" .
  done
done
exit $failed
