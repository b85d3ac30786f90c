#!/bin/sh
# Runs every linter.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
ruff check
ruff format --check
yamllint --strict .
# The two slow linters run at the same time. A failure of one does not hide the findings of the other.
mypy &
types=$!
ansible-lint --offline && rules=0 || rules=$?
wait $types
exit $rules
