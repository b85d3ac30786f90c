"""Copies the newest checkpoint to the machines that need it before an attempt begins. First comes
`find_checkpoint`, whose answer the plan needs, and then `place_checkpoints`.

The ranks of Tandem's trainer pass their checkpoint on themselves, so one machine that has it is
enough: files go through the control node only if no machine of the last attempt participates. With
a script, every machine gets the newest complete checkpoint (checkpoints.py).
"""

from __future__ import annotations

from pathlib import Path

from contract.errors import UserError
from launcher import collect, look
from launcher.machines.engine import MachineError, talk
from launcher.outputs import write_file
from launcher.plan.plan import Plan
from launcher.program import LAST
from launcher.site import RunSite, folders_of
from launcher.terminal import waiting
from launcher.watch.attempts import explain_uncopied_files


def find_checkpoint(site: RunSite) -> str | None:
    """Return the checkpoint for {last} in RESUME_ARGS, which all machines of the next attempt have
    then; "" if the program looks for it, None if the program begins again. Raises UserError."""
    program = site.needs.program
    if program.resume is None:
        return None
    if program.ranks_pass_on:
        return ""
    if not program.outputs:
        site.terminal.say("OUTPUT= is not given, so no checkpoint is copied between machines")
        return ""
    from launcher import checkpoints

    has_last = any(LAST in word for word in program.resume)
    name = checkpoints.hand_over_newest(site, program.outputs, has_last, program.resumes_own)
    return name if has_last else ""


def place_checkpoints(site: RunSite, plan: Plan) -> None:
    """Give the ranks of an attempt the newest checkpoint, and hide old ones. Raises UserError."""
    if not site.needs.program.ranks_pass_on or not site.attempts.list:
        return
    previous = site.attempts.list[-1]["nodes"]
    connected = {host.name for host in site.machines.hosts}
    if connected & set(previous):
        # A machine that comes back may hold a later step than the checkpoint from which the run
        # continued without it. Resuming from that step would skip images that other machines used.
        hide_checkpoints(site, plan, [host for host in connected if host not in previous])
        return
    # No machine of the last attempt continues. If their owners use them, they still answer.
    hosts = [host for host in site.hosts if host.name in previous]
    if not any(host.owner.signs for host in hosts):
        return
    node = plan.nodes[0]

    def give(file: Path, size: int, name: str) -> None:
        hide_checkpoints(site, plan, [*connected])
        folder = f"{node.output}/checkpoints/{node.host}"
        write_file(site.machines.nodes[node.host], file, size, folder, name)

    with waiting(site.terminal, f"sending the newest checkpoint to {node.host}"):
        machines = look.open_and_probe(hosts, site.needs, without_missing=True)
        try:
            run_folders = folders_of(machines, site.folder.name)
            collect.pass_on_newest(machines.nodes, run_folders, site.folder, give)
        except collect.Unwritable as error:
            raise UserError(explain_uncopied_files(site.folder, error)) from None
        finally:
            machines.close()


def hide_checkpoints(site: RunSite, plan: Plan, names: list[str]) -> None:
    """Move the checkpoints of these machines into a folder that ranks do not read. Raises
    MachineError."""
    move = 'test ! -e "$1" || { mkdir -p "$2" && mv "$1" "$2/before-attempt-$3"; }'
    for host in site.machines.hosts:
        # The checkpoints are moved, not deleted: the user may still want them.
        if host.name in names:
            output = site.folders[host.name]
            source, target = f"{output}/checkpoints/{host.name}", f"{output}/abandoned/{host.name}"
            argv = ["sh", "-c", move, "sh", source, target, str(plan.attempt)]
            _, stderr, status = talk(site.machines.nodes[host.name].start(argv), b"", 20.0)
            if status != 0:
                message = f"{host.label()}: {source} could not be moved to {target}: {stderr}"
                raise MachineError([host.name], message)
