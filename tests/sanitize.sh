#!/usr/bin/env bash
# Sanitizers. Without arguments: the suite on a build of the CPU ops with AddressSanitizer and UndefinedBehaviorSanitizer. With --gpu:
# tests/test_sanitized.py and the installed library under compute-sanitizer's four tools. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

# DMATTN_FAMILY chooses the kernels, as everywhere; run both on Hopper, because initcheck sees backward with sm80 alone. The tools run side by side; their logs are in build/sanitizer, or in $LOGS.
if [ "${1:-}" = --gpu ]; then
  shift
  logs=${LOGS:-build/sanitizer}
  mkdir -p "$logs"
  # The four share the cores, on which the references run: with all threads each, they mostly wait for each other's.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 3) / 4))}
  # An allocation of its own for each tensor, so that a byte too far is seen. initcheck has to see torch's kernels write, the others not.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  planted='import torch, dmattn
q = torch.randn(1, 2, 300, 64, device="cuda").half()
mask = dmattn.IntervalMask.sliding_window(300, 9, device="cuda")
mask.end.untyped_storage().resize_(64)
dmattn.attention(q, q, q, mask)
torch.cuda.synchronize()'
  declare -A pids
  for tool in memcheck racecheck initcheck synccheck; do
    only=(--kernel-name kernel_substring=dmattn)
    if [ $tool = initcheck ]; then only=(); fi
    DMATTN_SANITIZER=$tool compute-sanitizer --tool $tool "${only[@]}" --error-exitcode 99 --print-limit 20 \
      "$python" -m pytest -q -p no:cacheprovider -p no:xdist tests/test_sanitized.py "$@" >"$logs/$tool.log" 2>&1 &
    pids[$tool]=$!
  done
  failed=0
  # A fault on purpose: the tools must see our kernels at all.
  if compute-sanitizer --tool memcheck --kernel-name kernel_substring=dmattn --error-exitcode 99 "$python" -c "$planted" >"$logs/planted.log" 2>&1 ||
    ! grep -q "Invalid __global__ read" "$logs/planted.log"; then
    echo "planted: memcheck did not see a read past the end; see $logs/planted.log"
    failed=1
  fi
  for tool in "${!pids[@]}"; do
    code=0
    wait "${pids[$tool]}" || code=$?
    summary=$(grep -E "(ERROR|RACECHECK) SUMMARY" "$logs/$tool.log" || echo "no summary")
    printf '%-10s exit %d  %s  %s\n' "$tool" $code "$(grep -E '^[0-9]+ (passed|failed)' "$logs/$tool.log" | tail -1)" "$summary"
    if [ $code != 0 ] || ! grep -qE "SUMMARY: 0 (errors|hazards)" "$logs/$tool.log"; then
      failed=1
      grep -E "^=========" "$logs/$tool.log" | head -30
    fi
  done
  exit $failed
fi

# build/asan/site is a package like the installed one with the library swapped. Left out: what compiles or exports programs (slow, and not our
# memory), timings, and gigabytes. DMATTN_CPU_LEVEL chooses the instruction set, as everywhere.
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
cxx=${CXX:-c++}

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' python/dmattn/_version.py)
"$(dirname "$python")/cmake" -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM="$(dirname "$python")/ninja" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DDMATTN_SANITIZE=address,undefined -DDMATTN_CUDA=OFF -DPython_EXECUTABLE="$python" -DSKBUILD_PROJECT_VERSION="$version" >/dev/null
"$(dirname "$python")/cmake" --build build/asan
rm -rf build/asan/site && mkdir -p build/asan/site
cp -r python/dmattn build/asan/site/
"$(dirname "$python")/cmake" --install build/asan --prefix build/asan/site >/dev/null

export LD_PRELOAD="$("$cxx" -print-file-name=libasan.so):$("$cxx" -print-file-name=libubsan.so):$("$cxx" -print-file-name=libstdc++.so)"
# New memory is 0xff, NaN in every floating-point type: the allocator trick of dmattn.testing needs glibc's malloc, which ASan replaces.
export ASAN_OPTIONS="detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export PYTHONPATH="$PWD/build/asan/site" PYTHONMALLOC=malloc
"$python" -c 'import dmattn; print(dmattn.library_path())' | grep -q build/asan/site
exec "$python" -m pytest -p no:cacheprovider -q tests/test_select.py tests/test_masks.py tests/test_forward.py tests/test_backward.py \
  tests/test_errors.py tests/test_limits.py tests/test_sdpa.py tests/test_dynamic_mask_attention.py \
  -k "not million_keys and not memory_stays_linear and not two_to_the_31 and not from_flex and not gradcheck" "$@"
