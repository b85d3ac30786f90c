#!/bin/sh
# All checks: lint, unit tests, training tests, lab tests (root). Prints each part's name and seconds.
set -eu
cd "$(dirname "$0")/.."
part() {
    echo "== $1"
    shift
    begin=$(date +%s)
    "$@"
    echo "== $(($(date +%s) - begin)) s"
}

if [ "$(id -u)" = 0 ]; then
    part "Debian packages" tools/apt.sh tools/test-packages.txt lab/packages.txt
fi
part "environment" tools/venv.sh dev
part "lint" tools/lint.sh
part "unit tests" .venv/bin/python -m pytest --quiet tests/unit
part "training tests" .venv/bin/python -m pytest --quiet tests/train
if [ "$(id -u)" = 0 ]; then
    part "lab tests" .venv/bin/python -m pytest --quiet tests/lab
elif [ "${CI:-}" = true ]; then
    echo "tandem: in CI the lab tests must run, and they need root" >&2
    exit 1
else
    echo "== lab tests skipped: they boot machines, which needs root (sudo make test)"
fi
