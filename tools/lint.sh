#!/bin/sh
# Every linter, none of its rules skipped.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
ruff check
ruff format --check
mypy
yamllint --strict .
ansible-lint --offline
