#!/bin/sh
# Runs tests/gpu (docs/gpu.md) or, with the word bench, measures steps beside others' (bench/performance.md), each with a
# Python that has what it needs: PYTHON, else the first suitable python3 on the path. Needs neither internet nor
# `make env`.
set -eu
cd "$(dirname "$0")/.."
verb=test-gpu
if [ "${1:-}" = bench ]; then
    verb=bench-gpu
    shift
fi
lacks() {
    "$1" -c '
from importlib.util import find_spec
print(*(name for name in ("torch", "torchvision", "tqdm", "pytest") if find_spec(name) is None))
' 2>/dev/null || echo "a Python that runs"
}
found=${PYTHON:-$(which -a python3 || true)}
IFS='
'
for python in $found; do
    if [ -z "$(lacks "$python")" ]; then
        if [ $verb = bench-gpu ]; then exec "$python" -m bench.gpu "$@"; fi
        exec "$python" -m pytest --quiet --durations=5 tests/gpu "$@"
    fi
done
for python in $found; do
    echo "tandem: $python lacks: $(lacks "$python"). Name a Python with torch, torchvision, tqdm and pytest: PYTHON=<its path> make $verb" >&2
    exit 1
done
echo "tandem: there is no python3: PYTHON=<path of one with torch, torchvision, tqdm and pytest> make $verb" >&2
exit 1
