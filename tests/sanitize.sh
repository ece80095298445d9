#!/usr/bin/env bash
# The suite on a build of the CPU ops with AddressSanitizer and UndefinedBehaviorSanitizer. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

# build/asan/site is a package like the installed one with the library swapped. Left out: what compiles or exports programs (slow, and not our
# memory), timings, and gigabytes.
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
export ASAN_OPTIONS="detect_leaks=0:allocator_release_to_os_interval_ms=-1:max_malloc_fill_size=1073741824:malloc_fill_byte=255:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export PYTHONPATH="$PWD/build/asan/site" PYTHONMALLOC=malloc OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE
"$python" -c 'import dmattn; print(dmattn.library_path())' | grep -q build/asan/site
exec "$python" -m pytest -p no:cacheprovider -q -n "$(nproc)" tests/ops/test_select.py tests/masks/test_masks.py tests/ops/test_forward.py tests/ops/test_backward.py \
  tests/ops/test_errors.py tests/ops/test_limits.py tests/ops/test_sdpa.py tests/masks/test_index_calls.py tests/ops/test_indexer.py tests/ops/test_index_loss.py tests/ops/test_dynamic_mask_attention.py \
  tests/ops/test_decode.py tests/masks/test_index.py tests/ops/test_hostile_files.py \
  -m "not slow" -k "not compile" "$@"
