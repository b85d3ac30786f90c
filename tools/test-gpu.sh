#!/bin/sh
# Runs tests/gpu (docs/gpu.md) or, with the word bench, compares step times with those of other programs
# (bench/performance.md). It uses PYTHON, or the first python3 on the path that has the needed packages, so it needs
# neither internet nor `make env`.
set -eu
cd "$(dirname "$0")/.."
verb=test-gpu
if [ "${1:-}" = bench ]; then
    verb=bench-gpu
    shift
fi
list_missing() { # the needed packages that a Python does not have
    "$1" -c '
from importlib.util import find_spec
print(*(name for name in ("torch", "torchvision", "tqdm", "pytest") if find_spec(name) is None))
' 2>/dev/null || echo "a Python that runs"
}
pythons=${PYTHON:-$(which -a python3 || true)}
# A path may contain blanks, so only the ends of lines separate the paths.
IFS='
'
for python in $pythons; do
    if [ -z "$(list_missing "$python")" ]; then
        if [ $verb = bench-gpu ]; then exec "$python" -m bench.gpu "$@"; fi
        exec "$python" -m pytest --quiet --durations=5 tests/gpu "$@"
    fi
done
# No Python is suitable: the message is about the first one, which a user most likely means.
for python in $pythons; do
    echo "tandem: $python lacks: $(list_missing "$python"). Name a Python with torch, torchvision, tqdm and pytest: PYTHON=<its path> make $verb" >&2
    exit 1
done
echo "tandem: there is no python3: PYTHON=<path of one with torch, torchvision, tqdm and pytest> make $verb" >&2
exit 1
