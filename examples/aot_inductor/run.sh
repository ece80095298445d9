#!/bin/sh
# Exports, builds and runs the examples in a folder: examples/aot_inductor/run.sh [FOLDER], with PYTHON=.venv/bin/python by default. The
# second one generates with the demo's weights, if they are given as WEIGHTS=demo-output/weights.pt.
set -eu
here=$(dirname "$0")
folder=${1:-demo-output/aot_inductor}
python=${PYTHON:-.venv/bin/python}

"$python" "$here/export_model.py" "$folder/attention"
"$python" "$here/../export_generation.py" "$folder/generation" ${WEIGHTS:+--weights "$WEIGHTS"}
cmake -S "$here" -B "$folder/build" -DTORCH_DIR="$("$python" -c 'import torch; print(torch.__path__[0])')"
cmake --build "$folder/build"
library=$("$python" -c 'import dmattn; print(dmattn.library_path())')
"$folder/build/run_package" "$library" "$folder/attention"
"$folder/build/run_generation" "$library" "$folder/generation"
