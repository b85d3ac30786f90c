#!/bin/sh
# What `make test` and `make test-lab` run, one command after the other until one fails; CONTRIBUTING.md says what they
# need. (`make test-all`: tools/all_tests.py.)
set -eu
cd "$(dirname "$0")/.."
tier=$1 only=
if [ $# = 2 ]; then only=${2#--only=}; fi
# Without the words of this make, which one within a test would take for its own. And some images of machines forbid
# compiled files: then each program compiles its modules anew.
unset MAKEFLAGS MAKELEVEL MFLAGS TANDEM_GIVEN TANDEM_VERBS ONLY AGAIN PYTHONDONTWRITEBYTECODE
PATH=$PWD/.venv/bin:$PATH
export PATH

refuse() {
    echo "tandem: $1" >&2
    exit 2
}

chosen() { # the tests that ONLY= names: files below tests/, or folders below tests/$1 or tests/
    for word in $only; do
        found=
        for place in "$word" "tests/$1/$word" "tests/$word"; do
            case $place in
            *..*) ;;
            tests/*) if [ -z "$found" ] && [ -e "${place%%::*}" ]; then found=$place; fi ;;
            esac
        done
        if [ -z "$found" ]; then
            refuse "ONLY=$word: no such tests. Name a file below tests/, or a package: $(ls tests/unit | grep -v '[_.]' |
                tr '\n' ' ')train lab gpu messages."
        fi
        echo "$found"
    done
}

setup() { # with the Debian packages of these lists; without, tests are left out and named (tests/conftest.py)
    if [ "$(id -u)" = 0 ]; then
        tools/apt.sh "$@"
    elif [ "${CI:-}" = true ]; then
        sudo --non-interactive tools/apt.sh "$@"
    fi
    tools/venv.sh dev
    python examples/digits.py data/digits
}

tests() { # a title, then words of pytest
    echo "== $1 ($(df --output=avail -BG . | tail -n 1 | tr -d ' G') GB free)"
    shift
    ${last:-} python -m pytest --quiet --durations=15 --durations-min=2 "$@"
}

lab() { # three processes, since the tests mostly wait for machines; tests/lab/conftest.py says which files go together
    title=$1
    shift
    tests "$title" -o faulthandler_timeout=3600 -m "not long" --numprocesses=3 "$@"
}

spare() { # what no later command needs goes where CI is true, whose disk is small
    if [ "${CI:-}" = true ]; then rm -rf "$@"; fi
}

if [ "$tier" = test ]; then
    if [ -n "$only" ]; then files=$(chosen unit); fi
    setup tools/test-packages.txt
    if [ -n "$only" ]; then
        case $files in *tests/gpu*) device=--device=cpu ;; *) device= ;; esac
        # shellcheck disable=SC2086  # names of files, and a word or none
        tests "$only" -m "not long" $device $files
        exit
    fi
    # Most of lint is one process of ansible-lint, which leaves a core idle.
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    tests "what GPUs are to do, on the CPU" -m quick --device=cpu tests/gpu >"$log" 2>&1 &
    gpus=$!
    tools/lint.sh && failed=0 || failed=$?
    wait $gpus || failed=$?
    cat "$log"
    if [ $failed != 0 ]; then exit $failed; fi
    tests "training" -m "not long" --numprocesses=2 --dist=loadscope tests/train
    # The last, so that what was left out stands at the end. One more process than cores, since some tests wait for guards
    # or ranks. worksteal: neighbours stay in one process, so that fixtures that they share are made once.
    tests "unit tests" -m "not long" --numprocesses=$(($(nproc) + 1)) --dist=worksteal tests/unit tests/messages
    exit
fi

if [ "$(id -u)" != 0 ]; then refuse "the lab boots machines, which needs root: sudo make $tier"; fi
if [ -n "$only" ]; then files=$(chosen lab); fi
setup tools/test-packages.txt lab/packages.txt
if [ -n "$only" ]; then
    last=exec # what ends this script ends them, and is waited for while they take their machines down
    # shellcheck disable=SC2086  # names of files
    tests "$only" -o faulthandler_timeout=3600 -m "not long" $files
    exit
fi
tools/cores.sh
spare runs .tandem .venv-core2.16
# Beside the CUDA 10.2 stack, whose environment takes several GB, those that need none of their own.
beside=tests/lab/test_legacy.py
for name in site_check site_driver site_firewall site_network site_trust chaos control lab_faults lab_machines; do
    beside="$beside tests/lab/test_$name.py"
done
if [ "$(df --output=avail -BG . | tail -n 1 | tr -d ' G')" -ge 40 ]; then # all in one call, the longest first
    others=
    for file in tests/lab/test_*.py; do
        case " tests/lab/test_site.py $beside " in *" $file "*) ;; *) others="$others $file" ;; esac
    done
    last=exec
    # shellcheck disable=SC2086  # names of files
    lab "the lab" --no-loadscope-reorder tests/lab/test_site.py $beside $others
else
    # shellcheck disable=SC2086
    lab "the lab with the CUDA 10.2 stack" --no-loadscope-reorder $beside
    spare runs .tandem bundle/wheels/cu102-* /var/cache/tandem-lab/envs/bullseye
    last=exec
    # shellcheck disable=SC2046,SC2086
    lab "the lab" $(printf -- '--ignore=%s ' $beside) tests/lab
fi
