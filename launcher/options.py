"""What a person asked for, and what the trainer makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.inventory import CHECKOUT

# `-m trainer` reads its options without importing torch, so this takes a tenth of a second.
_ASK_TRAINER = """
import dataclasses, json, sys
from trainer.cli import parse
from trainer.errors import UserError
try:
    print(json.dumps(dataclasses.asdict(parse(sys.argv[1:]))))
except UserError as error:
    sys.exit(str(error))
"""


@dataclass(frozen=True)
class Options:
    """The options of `python -m launcher train`; None is: the tools' own default."""

    inventory: str = "inventory.ini"
    nodes: int | None = None
    model: str | None = None
    data: str = "digits"
    epochs: int | None = None
    batch: int | None = None
    precision: str | None = None
    sync: str | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    port: int | None = None
    queue: bool = False
    force: bool = False
    trainer: tuple[str, ...] = ()

    def trainer_args(self) -> list[str]:
        """Arguments of the trainer that are the same on each node, the output and data folders
        apart."""
        args = []
        model = self.model or "resnet18"
        recipe = f"recipes/{model}-{self.data}.yaml"
        if self.epochs is None and "/" not in self.data and (CHECKOUT / recipe).exists():
            args += ["--config", recipe]
        else:
            args += ["--model", model]
        for name, value in (
            ("--epochs", self.epochs),
            ("--per_node_batch_size", self.batch),
            ("--precision", self.precision),
            ("--sync", self.sync),
        ):
            args += [name, str(value)] if value is not None else []
        return [*args, *self.trainer]


def trainer_settings(options: Options) -> dict:
    """Every option of the trainer as it will read them. Raises UserError in the trainer's own
    words."""
    argv = [sys.executable, "-c", _ASK_TRAINER, *options.trainer_args()]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(
            done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else "the trainer's options cannot be read."
        )
    return json.loads(done.stdout)


def data_path(data: str, data_root: str, local: bool, name: str) -> str:
    """Where a machine has the images: a name lies in its data_root."""
    if "/" not in data:
        return f"{data_root}/{data}"
    path = Path(data)
    if path.is_absolute():
        return data
    if local:
        return str(path.absolute())
    raise UserError(
        f"DATA={data}: on {name} this path would begin nowhere: give a name below "
        f"{data_root} or a path from /."
    )
