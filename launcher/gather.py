"""`make bundle SCRIPT=` and `MODEL=`: gathers what a program needs from the internet into bundle/,
for machines without internet."""

from __future__ import annotations

from pathlib import Path

from contract.errors import UserError
from contract.options import Config
from contract.text import pluralize
from launcher import judge, look
from launcher.machines import inventory
from launcher.plan.sending import environment_of
from launcher.problems import Refused
from launcher.program import Needs
from launcher.programs import build_program
from launcher.terminal import Terminal, waiting


def gather_files(config: Config, terminal: Terminal) -> list[Path]:
    """Gather the program's packages, and the files that it fetches by name. Returns their paths.
    Raises UserError."""
    program, hosts, gathered = build_program(config), inventory.hosts_of(config), list[Path]()
    for file in program.files:
        if file.pretrained:
            from launcher.plan import pretrained

            with waiting(terminal, f"fetching {file.pretrained.address}"):
                path = pretrained.fetch(file.pretrained, terminal.say, pretrained.BUNDLE)
            gathered.append(path)
    # Only packages depend on the machines, so without requirements no machine is asked.
    if program.requirements:
        from launcher.plan import layer

        with waiting(terminal, f"checking {pluralize(len(hosts), 'machine')}"):
            machines = look.open_and_probe(hosts, Needs(config, program))
        try:
            # Wheels are made for one version of Python, so no bundle would suit all machines.
            if differing := judge.compare_pythons(machines):
                raise Refused(differing)
            with waiting(terminal, f"downloading the packages of {program.typed}"):
                environment = environment_of(machines)
                bundled = layer.build_layer(program.requirements, environment, layer.BUNDLE)
                gathered.append(bundled.tree.parent)
        finally:
            machines.close()
    if not gathered:
        raise UserError(
            f"{program.typed} needs nothing from the internet: the folder of the script has no "
            "requirements.txt (REQUIREMENTS= names another file), and neither MODEL=timm:NAME nor "
            "WEIGHTS= with a name was given."
        )
    return gathered
