"""Read the command line of `python -m lab`, and carry out its verb (docs/lab.md).

life.py starts and ends labs; node.py, network.py and control.py act on a lab that is up.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from lab import control, life, network, node, plan, shell
from lab.plan import Lab, LabError

CHECKOUT = Path(__file__).resolve().parent.parent
# Verbs that act on one node, and have no other arguments.
VERBS = {
    "kill": node.power_off,
    "freeze": node.freeze,
    "mend": node.mend,
    "reboot": node.reboot,
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs. Each verb also accepts --name."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", help="the lab's name (default: made from the checkout's path)")
    top = argparse.ArgumentParser(prog="python -m lab", description="a cluster inside one machine")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def verb(name: str, text: str, on_node: bool = False) -> argparse.ArgumentParser:
        command = verbs.add_parser(name, help=text, description=text, parents=[common])
        if on_node:
            command.add_argument("node", type=int, metavar="N", help="number of the node, from 1")
        return command

    up = verb("up", "boot the machines and wait until they answer ssh")
    up.add_argument("--nodes", type=int, default=4, metavar="N")
    up.add_argument("--rate", default="unshaped", help="each cable's: 1gbit, 100mbit, unshaped")
    release = f"one of {', '.join(plan.RELEASES)}, or one for each node with commas between"
    up.add_argument("--release", default=plan.RELEASES[0], help=release)
    up.add_argument("--with", dest="packages", default="", metavar="PACKAGE,...", help="Debian's")
    up.add_argument("--bare", action="store_true", help="as installed: password logins, no key")
    up.add_argument(
        "--vm", action="store_true", help="emulated machines with a kernel of their own"
    )
    up.add_argument("--cpus", type=int, metavar="N", help="for each emulated machine (1)")
    megabytes = f"MB for each emulated machine ({plan.MACHINE_MEGABYTES})"
    up.add_argument("--memory", type=int, metavar="MB", help=megabytes)
    up.add_argument("--no-bundle", action="store_true", help="do not gather what site.yml needs")
    execute = verb("exec", "run a command on the control node: exec -- COMMAND ...")
    execute.add_argument("--from", dest="place", choices=control.PLACES, default="control")
    verb("ssh", 'run a command line in a shell on node N: ssh N -- "COMMAND LINE"', on_node=True)
    verb("status", "print a table of the nodes")
    verb("kill", "cut the power of node N", on_node=True)
    verb("freeze", "make node N hang: it keeps its connections, but does nothing", on_node=True)
    verb("reboot", "reboot node N from inside, and wait until its user can log in", on_node=True)
    verb("cut", "unplug the cable of node N", on_node=True)
    verb("mend", "thaw node N, plug it in, switch it on", on_node=True)
    shape = verb("shape", "limit the cables, or that of node N, to RATE in both directions")
    shape.add_argument("rate", help="1gbit, 100mbit, unshaped")
    shape.add_argument("node", type=int, nargs="?", metavar="N")
    down = verb("down", "end the lab and leave nothing behind")
    down.add_argument("--all", action="store_true", help="all labs of this checkout")
    verb("doctor", "say what this machine lacks")
    return top


def check_host(vm: bool = False) -> None:
    """Raise LabError if the host lacks a tool, or if this process is not root's."""
    missing = shell.missing_tools(vm)
    if missing:
        raise LabError(
            f"this machine lacks {', '.join(missing)}: sudo tools/apt.sh lab/packages.txt"
        )
    if os.geteuid():
        raise LabError("the lab boots machines, which needs root: run it with sudo")


def refuse_rate_of_vms(lab: Lab, rate: Optional[str]) -> None:
    """Raise LabError if the cables of virtual machines are to have a rate."""
    if lab.vm and rate is not None:
        raise LabError("virtual machines are emulated, slower than any cable: they have no rate")


def plan_lab(name: str, args: argparse.Namespace) -> Lab:
    """Return the lab that `up` asks for. Raises LabError."""
    count = args.nodes
    if not 1 <= count <= plan.MAX_NODES:
        raise LabError(f"a lab has 1 to {plan.MAX_NODES} nodes, not {count}")
    cpus, megabytes = plan.check_hardware(args.vm, args.cpus, args.memory)
    return Lab(
        name,
        CHECKOUT,
        count,
        rate=plan.check_rate(args.rate),
        releases=plan.check_releases(args.release, count),
        bare=args.bare,
        vm=args.vm,
        packages=plan.check_packages(args.packages),
        cpus=cpus,
        megabytes=megabytes,
    )


def make_bundle(lab: Lab) -> None:
    """Download what site.yml installs on nodes: the host reaches the internet, nodes do not."""
    book = lab.checkout / "ansible/playbooks/bundle.yml"
    tool = lab.checkout / ".venv/bin/ansible-playbook"
    # A lab in which site.yml does not run needs no bundle, so this is no error.
    if not book.exists() or not tool.exists():
        print("lab: no bundle for the nodes: .venv or ansible/playbooks/bundle.yml is missing")
        return
    print("lab: gathering in bundle/ what the nodes need (minutes the first time)", flush=True)
    env = {**os.environ, "PATH": f"{tool.parent}:{os.environ.get('PATH', os.defpath)}"}
    bundling = subprocess.run(
        [tool, book],
        cwd=lab.checkout,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if bundling.returncode:
        print(bundling.stdout, file=sys.stderr)
        raise LabError("gathering bundle/ failed (see above); up --no-bundle does without it")


def run_verb(args: argparse.Namespace, command: list[str]) -> None:
    """Carry out a verb. `command`: the words after `--`. Raises LabError and OSError."""
    if args.verb == "doctor":
        check_host(vm=True)
        print("lab: nothing is missing")
        return
    check_host()
    name = plan.choose_name(args.name, CHECKOUT)
    if args.verb == "up":
        lab = plan_lab(name, args)
        if lab.vm:
            check_host(vm=True)
            refuse_rate_of_vms(lab, lab.rate)
        elif not (lab.bare or args.no_bundle) and plan.RELEASES[0] in lab.releases:
            make_bundle(lab)
        life.up(lab)
        return
    if args.verb == "down":
        names = [name]
        if args.all:
            # Other checkouts have their own labs, which stay.
            all_names = sorted(path.parent.name for path in life.STATE.glob("*/lab.json"))
            names = [lab_name for lab_name in all_names if life.load(lab_name).checkout == CHECKOUT]
        for lab_name in names:
            # `down` also removes the remains of a lab that is not complete, so this is no error.
            if not life.exists(lab_name):
                print(f"lab: there is no lab {lab_name}: nothing to end", file=sys.stderr)
            life.down(lab_name)
        return
    run_on_lab(life.load(name), args, command)


def run_on_lab(lab: Lab, args: argparse.Namespace, command: list[str]) -> None:
    """Carry out a verb on a lab that is up. `command`: the words after `--`. Raises LabError and
    OSError."""
    if args.verb == "exec":
        if not command:
            raise LabError("say what to run: python -m lab exec -- COMMAND ...")
        control.execute(lab, args.place, command)
    elif args.verb == "status":
        print(life.describe_status(lab))
    elif args.verb == "shape":
        rate = plan.check_rate(args.rate)
        refuse_rate_of_vms(lab, rate)
        for machine in lab.nodes if args.node is None else [lab.node(args.node)]:
            network.carry_out(network.shaping(lab, machine, rate))
    elif args.verb == "ssh":
        control.execute(lab, "control", control.make_ssh_command(lab, lab.node(args.node), command))
    elif args.verb == "cut":
        network.plug(lab, lab.node(args.node), on=False)
    else:
        VERBS[args.verb](lab, lab.node(args.node))


def main(argv: Sequence[str]) -> int:
    """Carry out a command line, and return its exit code."""
    # The words after `--` are a command, as in `exec -- ls -l`. Its options are not the lab's.
    end = [*argv, "--"].index("--")
    try:
        run_verb(make_parser().parse_args(argv[:end]), list(argv[end + 1 :]))
    except (LabError, OSError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
