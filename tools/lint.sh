#!/bin/sh
# Every linter, none of its rules skipped.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
ruff check
ruff format --check
yamllint --strict .
# The two slow ones at once, and what both find.
mypy &
types=$!
ansible-lint --offline && rules=0 || rules=$?
wait $types
exit $rules
