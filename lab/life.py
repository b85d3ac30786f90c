"""Start and end a whole lab, and show its status.

A lab is up when its file lab.json exists. `up` leaves nothing behind if it fails.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lab import base, cgroup, disk, network, node, vm
from lab.plan import CACHE, DISKS, STATE, Lab, LabError

# Each systemd needs about seven inotify instances, and all nodes count as one user, root. Linux
# allows a user 128. Beyond the limit a node dies at boot without a message.
INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES = 8192
READY, DONE = b"ready", b"done"  # what the watcher of or_undo says, and what it hears

Step = Callable[[], None]


def or_undo(reserve: Step, action: Step, undo: Step) -> None:
    """Run `action`, then `undo` if it raises or if any signal kills this process, even SIGKILL.

    `reserve` comes first. If it raises LabError, the caller gets that error and nothing is undone.
    `reserve` and `undo` run in a watcher, a process in another session that waits for the end of a
    connection. Therefore somebody can always undo what exists. When the exception of `action`
    reaches the caller, `undo` has finished.
    """
    ours, theirs = socket.socketpair()
    watcher = os.fork()
    if watcher == 0:
        ours.close()
        _watch(theirs, reserve, undo)
    theirs.close()
    try:
        answer = ours.recv(4096)
        if answer != READY:
            raise LabError(answer.decode())
        action()
        ours.send(DONE)
    finally:
        ours.close()
        os.waitpid(watcher, 0)


def _watch(connection: socket.socket, reserve: Step, undo: Step) -> NoReturn:
    """Be the watcher of or_undo: call `reserve`, and call `undo` unless the caller sends DONE."""
    os.setsid()  # a signal to the caller's process group must not reach this process
    try:
        reserve()
    except (LabError, OSError) as error:
        connection.send(str(error).encode())
        os._exit(1)
    try:
        connection.send(READY)
        is_done = connection.recv(16) == DONE
    except OSError:  # the caller died before it read
        is_done = False
    try:
        if not is_done:
            undo()
    except Exception as error:
        print(f"lab: could not undo what was started: {error}", file=sys.stderr, flush=True)
    os._exit(0)  # without the cleanup of the caller's Python


def load(name: str) -> Lab:
    """Return a lab that is up. Raises LabError."""
    try:
        saved = json.loads((STATE / name / "lab.json").read_text())
    except FileNotFoundError:
        raise LabError(f"there is no lab {name}: python -m lab up") from None
    # JSON has no tuples, so lab.json has lists instead.
    tuples = {key: tuple(value) for key, value in saved.items() if isinstance(value, list)}
    return Lab(**{**saved, **tuples, "checkout": Path(saved["checkout"])})


def up(lab: Lab) -> None:
    """Boot all nodes, and return when they answer ssh. If that fails, remove everything."""
    or_undo(lambda: _reserve(lab), lambda: _make(lab), lambda: down(lab.name))


def _reserve(lab: Lab) -> None:
    """Reserve the lab's name by making the folder of its state. Raises LabError if it exists."""
    if not lab.state.exists() and exists(lab.name):
        down(lab.name)  # the host crashed: /run is empty, but the disks are not
    STATE.mkdir(exist_ok=True)
    try:
        lab.state.mkdir(mode=0o700)
    except FileExistsError:
        raise LabError(f"lab {lab.name} is up already: python -m lab down") from None


def _make(lab: Lab) -> None:
    """Make the lab's nodes from within the lab's control group."""
    # Every process that `up` starts is then in the group from the start, and `down` can find it.
    previous_group = cgroup.current_group()
    try:
        cgroup.join(cgroup.group_of(lab.name, "up"))
        _make_nodes(lab)
    finally:
        (previous_group / "cgroup.procs").write_text("0")
    cgroup.remove(cgroup.group_of(lab.name, "up"))


def _make_nodes(lab: Lab) -> None:
    """Make the files and the network of all nodes, boot the nodes, and wait for their ssh."""
    start = time.monotonic()
    if int(INOTIFY_LIMIT.read_text()) < INOTIFY_INSTANCES:
        INOTIFY_LIMIT.write_text(str(INOTIFY_INSTANCES))
    # Each different system once, in the order of the nodes.
    for system in dict.fromkeys(machine.system for machine in lab.nodes):
        base.ensure(system, lab)
        if system.vm:
            vm.ensure(system, lab)
    for place in ("control", "stranger"):
        cgroup.group_of(lab.name, place).mkdir(parents=True)
    # The keys come before the disks, which contain the public one.
    disk.write_control_keys(lab)
    for machine in lab.nodes:
        machine.envs.mkdir(parents=True, exist_ok=True)
        disk.write(lab, machine, base.folder(machine.system))
        if lab.vm:
            vm.write_disk(machine)
    # The control node trusts the nodes' host keys. For bare nodes `make bootstrap` asks the user.
    known_hosts = disk.known_hosts(lab)
    (lab.state / "known_hosts").write_text(known_hosts)
    if not lab.bare:
        (lab.state / "control.ssh/known_hosts").write_text(known_hosts)
    names = "".join(f"{machine.address}\t{machine.name}\n" for machine in lab.nodes)
    (lab.state / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{names}")
    for folder in ("cgroup", "ansible"):
        (lab.state / folder).mkdir()
    network.carry_out(network.plan(lab))
    node.wait_for_ssh(lab, {machine: node.boot(lab, machine) for machine in lab.nodes})
    # A lab is up when this file exists, so it is written last.
    saved = {**dataclasses.asdict(lab), "checkout": str(lab.checkout)}
    (lab.state / "lab.json").write_text(json.dumps(saved))
    print(f"lab {lab.name}: {lab.count} nodes answer ssh after {time.monotonic() - start:.1f} s")


def down(name: str) -> None:
    """End a lab, even if it is incomplete or its nodes are frozen or dead."""
    group = cgroup.group_of(name)
    # A process in the lab's group would kill itself.
    if cgroup.current_group().is_relative_to(group):
        cgroup.join(cgroup.mount_point())
    cgroup.kill(group)
    for netns in network.namespaces_of(name):
        network.remove(netns)
    cgroup.remove(group)
    disk.remove(name, DISKS)
    # base.ensure_folder gives unfinished folders such names.
    for path in (CACHE / "bases").glob(f"*.{name}.unfinished"):
        shutil.rmtree(path)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(STATE / name)
    for shared_folder in (STATE, DISKS, group.parent):
        with contextlib.suppress(OSError):  # another lab uses it
            shared_folder.rmdir()


def exists(name: str) -> bool:
    """Return whether anything of a lab exists, complete or not."""
    folders = (STATE / name, DISKS / name, cgroup.group_of(name))
    return any(folder.exists() for folder in folders) or bool(network.namespaces_of(name))


def describe_status(lab: Lab) -> str:
    """Return a table of the nodes, at most 80 columns wide."""
    ports = network.read_ports(lab)
    kind = ("bare " if lab.bare else "") + ("virtual " if lab.vm else "")
    head = f"lab {lab.name}: {lab.count} {kind}nodes, Debian {', '.join(lab.releases)}"
    rows = [("node", "address", "state", "ssh", "rate")]
    for machine in lab.nodes:
        plugged, rate = ports[machine.port]
        answers = plugged and network.answers_ssh(lab, machine, connect=0.5, greet=1)
        state, ssh = node.describe_state(lab, machine, plugged, answers), "yes" if answers else "no"
        rows.append((machine.name, machine.address, state, ssh, rate or "unshaped"))
    return "\n".join([head, *("{:<8}{:<17}{:<14}{:<5}{}".format(*row) for row in rows)])
