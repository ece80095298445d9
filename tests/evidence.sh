#!/usr/bin/env bash
# What CI cannot show, on a GPU machine that may have neither network nor much time: tests/evidence.sh WHEEL OUT COMMIT [PART ...]
#
# Installs the wheel into a folder of its own beside the machine's torch and runs the parts in their order, one after another: two at once
# fight for the cores that the references run on, and times suffer. OUT/evidence.tgz holds all logs and JSON and is written anew after each part, so that a
# run that is cut short leaves what was done. LIMIT (seconds, default 300) is for each part. Ends with 1 when a part failed.
# Parts: suite-sm90 suite-sm80 tools-sm90 tools-sm80 turns settled; all by default.
set -uo pipefail
[ $# -ge 3 ] || { sed -n '2,8s/^# \?//p' "$0"; exit 2; }
wheel=$(realpath "$1") out=$(realpath "$2") commit=$3
shift 3
cd "$(dirname "$0")/.."
parts=${*:-suite-sm90 suite-sm80 tools-sm90 tools-sm80 turns settled}
python=${PYTHON:-python3}
site=$(mktemp -d) logs=$(mktemp -d)
"$python" -m pip install -q --no-deps --no-index --no-compile --target "$site" "$wheel" || exit 2
export PYTHONPATH=$site PYTHON=$(command -v "$python") DMATTN_COMMIT=$commit
tests=$(sed -nE 's/^GPU_TESTS := .*,(.*)\)$/\1/p' Makefile | sed -E 's|(\w+)|tests/test_\1.py|g')  # those of make gpu, where there is no make
plain="-q -p no:cacheprovider -p no:xdist -p no:benchmark"  # plugins that the machine may have, and that warn

run_part() {
  case $1 in
    suite-*) DMATTN_FAMILY=${1#suite-} "$python" -m pytest $plain --durations 5 $tests ;;
    tools-*) DMATTN_FAMILY=${1#tools-} LOGS=$logs/$1 bash tests/sanitize.sh --gpu $plain ;;
    turns) "$python" benchmarks/run.py --table cuda --output "$logs" ;;
    settled) "$python" benchmarks/run.py --table cuda --settle 0.3 --repeats 2 --no-memory --output "$logs" ;;
    *) echo "evidence: no part $1"; return 2 ;;
  esac
}
export -f run_part
export python tests logs plain

failed=0
for part in $parts; do
  began=$SECONDS
  timeout "${LIMIT:-300}" bash -c "run_part $part" >"$logs/$part.txt" 2>&1
  code=$?
  [ $code = 0 ] || failed=1
  tar czf "$out/evidence.tgz" -C "$logs" .
  printf '%-11s exit %3d  %3d s  %s\n' "$part" $code $((SECONDS - began)) "$(grep -E 'passed|failed|Written|SUMMARY' "$logs/$part.txt" | tail -1)"
done
exit $failed
