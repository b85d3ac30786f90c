#!/bin/sh
# Runs the tests of `make test` and `make test-lab`, one command after the other until one fails. CONTRIBUTING.md
# describes their requirements. tools/all_tests.py runs `make test-all`.
set -eu
cd "$(dirname "$0")/.."
tier=$1 only=
if [ $# = 2 ]; then only=${2#--only=}; fi
# A test may call make, which would read the variables of the present make. PYTHONDONTWRITEBYTECODE of some images
# would make each program compile its modules again.
unset MAKEFLAGS MAKELEVEL MFLAGS TANDEM_GIVEN TANDEM_VERBS ONLY AGAIN PYTHONDONTWRITEBYTECODE
PATH=$PWD/.venv/bin:$PATH
export PATH

refuse() {
    echo "tandem: $1" >&2
    exit 2
}

list_only() { # prints the tests that ONLY= names: files below tests/, or folders below tests/$1 or tests/
    for word in $only; do
        tests=
        for path in "$word" "tests/$1/$word" "tests/$word"; do
            # A path out of tests/ is refused. A test after :: is not a part of the file's path.
            case $path in
            *..*) ;;
            tests/*) if [ -z "$tests" ] && [ -e "${path%%::*}" ]; then tests=$path; fi ;;
            esac
        done
        if [ -z "$tests" ]; then
            refuse "ONLY=$word: no such tests. Name a file below tests/, or a package: $(ls tests/unit | grep -v '[_.]' |
                tr '\n' ' ')train lab gpu messages."
        fi
        echo "$tests"
    done
}

setup() { # installs the Debian packages of these lists; tests/conftest.py lists the tests that are skipped without them
    if [ "$(id -u)" = 0 ]; then
        tools/apt.sh "$@"
    elif [ "${CI:-}" = true ]; then
        sudo --non-interactive tools/apt.sh "$@"
    fi
    tools/venv.sh dev
    python examples/digits.py data/digits
}

run_tests() { # a title, then words of pytest
    echo "== $1 ($(df --output=avail -BG . | tail -n 1 | tr -d ' G') GB free)"
    shift
    ${last:-} python -m pytest --quiet --durations=15 --durations-min=2 "$@"
}

# The tests of the lab mostly wait for machines, so three run at a time; tests/lab/conftest.py groups the files.
run_lab() {
    title=$1
    shift
    run_tests "$title" -o faulthandler_timeout=3600 -m "not long" --numprocesses=3 "$@"
}

free_disk() { # removes files that no later command needs, but only in CI, whose disk is small
    if [ "${CI:-}" = true ]; then rm -rf "$@"; fi
}

if [ "$tier" = test ]; then
    if [ -n "$only" ]; then files=$(list_only unit); fi
    setup tools/test-packages.txt
    if [ -n "$only" ]; then
        case $files in *tests/gpu*) device=--device=cpu ;; *) device= ;; esac
        # shellcheck disable=SC2086  # names of files, and a word or none
        run_tests "$only" -m "not long" $device $files
        exit
    fi
    # ansible-lint takes most of lint's time with one process, so the tests of tests/gpu use the idle core.
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    run_tests "what GPUs are to do, on the CPU" -m quick --device=cpu tests/gpu >"$log" 2>&1 &
    gpus=$!
    tools/lint.sh && failed=0 || failed=$?
    wait $gpus || failed=$?
    cat "$log"
    if [ $failed != 0 ]; then
        # The tests' lines may have scrolled those of the linters away.
        echo "tandem: a linter, or a test of what GPUs are to do, failed: its lines are above" >&2
        exit $failed
    fi
    run_tests "training" -m "not long" --numprocesses=2 --dist=loadscope tests/train
    # The unit tests come last, so that the list of skipped tests is at the end. Some tests wait for guards or ranks, so
    # there is one process more than cores. worksteal keeps neighbours in one process, which makes shared fixtures once.
    run_tests "unit tests" -m "not long" --numprocesses=$(($(nproc) + 1)) --dist=worksteal tests/unit tests/messages
    exit
fi

if [ "$(id -u)" != 0 ]; then refuse "the lab boots machines, which needs root: sudo make $tier"; fi
if [ -n "$only" ]; then files=$(list_only lab); fi
setup tools/test-packages.txt lab/packages.txt
if [ -n "$only" ]; then
    last=exec # pytest replaces this script, so a signal reaches it, and the caller waits while it removes its machines
    # shellcheck disable=SC2086  # names of files
    run_tests "$only" -o faulthandler_timeout=3600 -m "not long" $files
    exit
fi
tools/cores.sh
free_disk runs .tandem .venv-core2.16
# test_legacy.py needs several GB for the environment of the CUDA 10.2 stack. The tests after it need no environment, so
# all of them fit on a small disk together.
with_legacy=tests/lab/test_legacy.py
for name in site_check site_driver site_firewall site_network site_trust chaos control lab_faults lab_machines; do
    with_legacy="$with_legacy tests/lab/test_$name.py"
done
if [ "$(df --output=avail -BG . | tail -n 1 | tr -d ' G')" -ge 40 ]; then
    # On a large disk one call runs all tests, and begins with the longest.
    remaining=
    for file in tests/lab/test_*.py; do
        case " tests/lab/test_site.py $with_legacy " in *" $file "*) ;; *) remaining="$remaining $file" ;; esac
    done
    last=exec
    # shellcheck disable=SC2086  # names of files
    run_lab "the lab" --no-loadscope-reorder tests/lab/test_site.py $with_legacy $remaining
else
    # shellcheck disable=SC2086
    run_lab "the lab with the CUDA 10.2 stack" --no-loadscope-reorder $with_legacy
    free_disk runs .tandem bundle/wheels/cu102-* /var/cache/tandem-lab/envs/bullseye
    last=exec
    # shellcheck disable=SC2046,SC2086
    run_lab "the lab" $(printf -- '--ignore=%s ' $with_legacy) tests/lab
fi
