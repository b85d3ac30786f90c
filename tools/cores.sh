#!/bin/sh
# Both Ansibles, that of .venv and that of `make provision CORE=2.16`, read every playbook and pass the unit tests of ansible/.
set -eu
cd "$(dirname "$0")/.."
tools/venv.sh core2.16
for environment in .venv .venv-core2.16; do
    bin=$PWD/$environment/bin
    "$bin/ansible-playbook" --version | sed -n 1p
    PATH="$bin:$PATH" "$bin/ansible-playbook" --syntax-check --inventory inventory.ini site.yml ansible/playbooks/*.yml >/dev/null
    "$bin/python" -m pytest --quiet tests/unit/ansible
done
