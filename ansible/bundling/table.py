"""Read ansible/stacks.yml, the table of versions, for the orders of the bundle."""

from pathlib import Path

import yaml

from contract.errors import UserError

ANSIBLE = Path(__file__).resolve().parents[1]


def read():
    """Read the contents of stacks.yml under "stacks"."""
    return yaml.safe_load((ANSIBLE / "stacks.yml").read_text())["stacks"]


def row(table, stack):
    """Find the row of a stack. Raises UserError if there is none."""
    rows = table["rows"]
    if stack not in rows:
        raise UserError(
            f"stack {stack!r} is not in ansible/stacks.yml, which has {', '.join(rows)}"
        )
    return rows[stack]
