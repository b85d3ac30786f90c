#!/bin/sh
# Runs all checks: lint, unit tests, training tests, lab tests (which need root). Prints each part's name and seconds.
# A word selects one part: unit (the unit tests that start no processes; no root), legacy (the CUDA 10.2 stack), chaos
# (40 faults, machines that lie, troubles of the control machine), bench (figures), long (the tests that the call without
# a word leaves out, since they take minutes).
set -eu
cd "$(dirname "$0")/.."
part() {
    echo "== $1 ($(df -h --output=avail . | tail -1 | tr -d ' ') free)"
    shift
    begin=$(date +%s)
    "$@"
    echo "== $(($(date +%s) - begin)) s"
}
# Removes what later parts do not need: CI's disk has little more than 20 GB, and an environment takes 9 of them.
# Elsewhere things stay, to save making them again and so that a failed run can be examined.
spare() {
    if [ "${CI:-}" = true ]; then rm -rf "$@"; fi
}
# The call without a word needs both environments. The second is made meanwhile; if that fails, tools/cores.sh says why.
environments() {
    older=
    if [ -z "$1" ]; then
        tools/venv.sh core2.16 >/dev/null 2>&1 &
        older=$!
    fi
    tools/venv.sh dev
    if [ -n "$older" ]; then wait "$older" || :; fi
}
check() {
    name=$1
    shift
    part "$name" .venv/bin/python -m pytest --quiet --durations=15 --durations-min=10 "$@"
}

# Machines of the lab boot, and are provisioned, within one test.
check_lab() {
    check "$@" -o faulthandler_timeout=3600
}

if [ "${1:-}" = unit ]; then
    tools/venv.sh dev
    check "unit tests" -m "not long and not processes" --numprocesses=auto --dist=worksteal tests/unit
    exit
fi
if [ "$(id -u)" = 0 ]; then
    part "Debian packages" tools/apt.sh tools/test-packages.txt lab/packages.txt
elif [ "${CI:-}" = true ] || [ -n "${1:-}" ]; then
    echo "tandem: the lab tests boot machines, which needs root" >&2
    exit 1
fi
part "environment" environments "${1:-}"
export PATH="$PWD/.venv/bin:$PATH"
part "data" .venv/bin/python examples/digits.py data/digits
case "${1:-}" in
legacy)
    check_lab "CUDA 10.2 stack" tests/lab/test_legacy.py
    exit
    ;;
chaos)
    export TANDEM_CHAOS_TRIALS=40
    check_lab "chaos" tests/lab/test_chaos.py tests/lab/test_chaos_trainer.py
    check_lab "machines that lie, troubles of the control machine" tests/lab/test_hostile_node.py tests/lab/test_torture.py
    check_lab "ten minutes" tests/lab/test_long_run.py
    exit
    ;;
bench)
    check_lab "figures" tests/bench
    exit
    ;;
long)
    check "long unit tests" -m long tests/unit
    check_lab "long lab tests" -m long tests/lab
    exit
    ;;
esac
part "lint" tools/lint.sh
# worksteal: neighbours stay in one process, so that fixtures that they share are made once. One process more than there
# are cores, since some tests wait for guards or ranks.
check "unit tests" -m "not long" --numprocesses=$(($(nproc) + 1)) --dist=worksteal tests/unit
part "both Ansibles" tools/cores.sh
check "training tests" --numprocesses=2 --dist=loadscope tests/train
spare runs .tandem .venv-core2.16
if [ "$(id -u)" = 0 ]; then
    # They mostly wait for machines, so two processes share them, the longest file first; tests/lab/conftest.py says
    # which files go together. The CUDA 10.2 stack takes a disk of its own, so that beside it go files without an
    # environment; what it alone needs then makes room.
    small="tests/lab/test_site_check.py tests/lab/test_site_driver_short.py tests/lab/test_site_firewall.py
        tests/lab/test_site_network.py tests/lab/test_site_oomd.py tests/lab/test_site_trust.py"
    # shellcheck disable=SC2086 # the words of a list
    check_lab "lab tests with the CUDA 10.2 stack" -m "not long" --numprocesses=2 --no-loadscope-reorder \
        tests/lab/test_legacy.py $small
    spare runs .tandem bundle/wheels/cu102-* /var/cache/tandem-lab/envs/bullseye
    # shellcheck disable=SC2046
    check_lab "lab tests" -m "not long" --numprocesses=2 $(printf -- '--ignore=%s ' tests/lab/test_legacy.py $small) tests/lab
else
    echo "== lab tests skipped: they boot machines, which needs root (sudo make test)"
fi
