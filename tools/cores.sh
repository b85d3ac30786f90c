#!/bin/sh
# Checks the syntax of every playbook with each Ansible: that of .venv, and those of `make provision CORE=2.16` and
# CORE=2.21. Also runs the unit tests of ansible/ with these two; `make test` runs them with the Ansible of .venv.
set -eu
cd "$(dirname "$0")/.."
check_syntax() {
    "$1/bin/ansible-playbook" --version | sed -n 1p
    PATH="$PWD/$1/bin:$PATH" "$1/bin/ansible-playbook" --syntax-check --inventory inventory.ini site.yml ansible/playbooks/*.yml >/dev/null
}
check_syntax .venv &
syntax=$!
for core in 2.16 2.21; do
    if ! tools/venv.sh core$core; then
        # A failure of 2.16 ends this script. 2.21 needs Python 3.12 or newer, and is skipped without that.
        if [ $core = 2.16 ]; then exit 1; fi
        echo "CORE=$core was not tried: it needs Python 3.12 here"
        continue
    fi
    check_syntax .venv-core$core
    PATH="$PWD/.venv-core$core/bin:$PATH" .venv-core$core/bin/python -m pytest --quiet --numprocesses=auto --dist=worksteal -m "not long" tests/unit/ansible
done
wait $syntax
