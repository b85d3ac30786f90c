#!/bin/sh
# Runs every linter.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
ruff check
ruff format --check
yamllint --strict .
# The two slow ones run at the same time, and both report what they find.
mypy &
types=$!
ansible-lint --offline && rules=0 || rules=$?
wait $types
exit $rules
