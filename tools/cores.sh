#!/bin/sh
# Checks the syntax of every playbook with both Ansibles, that of .venv and that of `make provision CORE=2.16`, and runs
# the unit tests of ansible/ with the second; with the first they are a part of tests/unit.
set -eu
cd "$(dirname "$0")/.."
tools/venv.sh core2.16
reads() {
    "$1/bin/ansible-playbook" --version | sed -n 1p
    PATH="$PWD/$1/bin:$PATH" "$1/bin/ansible-playbook" --syntax-check --inventory inventory.ini site.yml ansible/playbooks/*.yml >/dev/null
}
reads .venv &
newer=$!
reads .venv-core2.16
wait $newer
PATH="$PWD/.venv-core2.16/bin:$PATH" .venv-core2.16/bin/python -m pytest --quiet --numprocesses=auto --dist=worksteal -m "not long" tests/unit/ansible
