#!/usr/bin/env bash
# Five pages of the built site (make docs) in a headless browser, light and dark, wide and narrow: tools/screenshots.sh FOLDER
set -euo pipefail
site=$(cd "$(dirname "$0")/.." && pwd)/build/site
to=$1
mkdir -p "$to"
user=$(mktemp -d)
trap 'rm -rf "$user"' EXIT
shot() {  # page name width,height dark=0|light=1
  chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$user" --blink-settings=preferredColorScheme="$4" \
    --window-size="$3" --virtual-time-budget=3000 --screenshot="$to/$2.png" "file://$site/$1" > /dev/null 2>&1
}
shot index.html front_light 1400,1200 1
shot masks.html explorer_dark 1400,1200 0
shot learning.html learning_light 1400,1200 1
shot performance.html performance_narrow 500,1200 1
shot serving.html serving_narrow_dark 500,1200 0
"$(dirname "$0")/../.venv/bin/python" - "$to" << 'PY'
import pathlib, sys
from PIL import Image
for path in pathlib.Path(sys.argv[1]).glob("*.png"):
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)
PY
