#!/bin/sh
# Exports, builds and runs the example in a folder: examples/aot_inductor/run.sh [FOLDER], with PYTHON=.venv/bin/python by default.
set -eu
here=$(dirname "$0")
folder=${1:-demo-output/aot_inductor}
python=${PYTHON:-.venv/bin/python}

"$python" "$here/export_model.py" "$folder"
cmake -S "$here" -B "$folder/build" -DTORCH_DIR="$("$python" -c 'import torch; print(torch.__path__[0])')"
cmake --build "$folder/build"
"$folder/build/run_package" "$("$python" -c 'import dmattn; print(dmattn.library_path())')" "$folder"
