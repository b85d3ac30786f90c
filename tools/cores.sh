#!/bin/sh
# Checks the syntax of every playbook with each Ansible, that of .venv and those of `make provision CORE=2.16` and
# CORE=2.21, and runs the unit tests of ansible/ with the latter two; with the first they are a part of tests/unit.
set -eu
cd "$(dirname "$0")/.."
reads() {
    "$1/bin/ansible-playbook" --version | sed -n 1p
    PATH="$PWD/$1/bin:$PATH" "$1/bin/ansible-playbook" --syntax-check --inventory inventory.ini site.yml ansible/playbooks/*.yml >/dev/null
}
reads .venv &
newer=$!
for core in 2.16 2.21; do
    if ! tools/venv.sh core$core; then
        if [ $core = 2.16 ]; then exit 1; fi
        echo "CORE=$core was not tried: it needs Python 3.12 here"
        continue
    fi
    reads .venv-core$core
    PATH="$PWD/.venv-core$core/bin:$PATH" .venv-core$core/bin/python -m pytest --quiet --numprocesses=auto --dist=worksteal -m "not long" tests/unit/ansible
done
wait $newer
