"""A whole lab: up, down, status."""

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
from lab.plan import DISKS, STATE, Lab, LabError

INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
WATCHES = 8192
READY, DONE = b"ready", b"done"

Step = Callable[[], None]


def or_undo(reserve: Step, action: Step, undo: Step) -> None:
    """Runs `action`, then `undo` if it raises or this process dies of any signal, even SIGKILL.

    `reserve` comes first; if it raises LabError, the caller gets that error and nothing is undone.
    It and `undo` run in a watcher, a process with a session of its own that waits for the end of a
    connection, so that at no moment something exists that nobody would undo. When the exception of
    `action` reaches the caller, `undo` has finished.
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
    os.setsid()  # a signal to the caller's process group must not reach this one
    try:
        reserve()
    except (LabError, OSError) as error:
        connection.send(str(error).encode())
        os._exit(1)
    try:
        if not _succeeded(connection):
            undo()
    except Exception as error:
        print(f"lab: could not undo what was started: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def _succeeded(connection: socket.socket) -> bool:
    try:
        connection.send(READY)
        return connection.recv(16) == DONE
    except ConnectionError:  # the caller died before it read
        return False


def load(name: str) -> Lab:
    try:
        saved = json.loads((STATE / name / "lab.json").read_text())
    except FileNotFoundError:
        raise LabError(f"there is no lab {name}: python -m lab up") from None
    lists = {key: tuple(value) for key, value in saved.items() if isinstance(value, list)}
    return Lab(**{**saved, **lists, "checkout": Path(saved["checkout"])})


def up(lab: Lab) -> None:
    """Boots all nodes, and returns when they answer ssh; if that fails, nothing is left behind."""
    or_undo(lambda: _reserve(lab), lambda: _make(lab), lambda: down(lab.name))


def _reserve(lab: Lab) -> None:
    """Reserves the lab's name: a name is taken when the folder of its state exists."""
    if not lab.state.exists() and exists(lab.name):
        down(lab.name)  # what a crash of the host left: it empties /run, but not the disks
    STATE.mkdir(exist_ok=True)
    try:
        lab.state.mkdir(mode=0o700)
    except FileExistsError:
        raise LabError(f"lab {lab.name} is up already: python -m lab down") from None


def _allow_watches() -> None:
    """Raises the limit on inotify instances: each systemd takes about seven, all nodes count as one
    user, root, and Linux grants a user 128. Beyond that a node dies at boot without a message."""
    if int(INOTIFY_LIMIT.read_text()) < WATCHES:
        INOTIFY_LIMIT.write_text(str(WATCHES))


def _make(lab: Lab) -> None:
    # Every process that `up` starts is in the lab's group from the start, so `down` finds them all.
    before = cgroup.own()
    try:
        cgroup.join(cgroup.of(lab.name, "up"))
        _make_nodes(lab)
    finally:
        (before / "cgroup.procs").write_text("0")
    cgroup.remove(cgroup.of(lab.name, "up"))


def _make_nodes(lab: Lab) -> None:
    start = time.monotonic()
    _allow_watches()
    for system in {machine.system: None for machine in lab.nodes}:
        base.ensure(system, lab)
        if system.vm:
            vm.ensure(system, lab)
    for place in ("control", "stranger"):
        cgroup.of(lab.name, place).mkdir(parents=True)
    disk.write_control_keys(lab)
    for machine in lab.nodes:
        machine.envs.mkdir(parents=True, exist_ok=True)
        disk.write(lab, machine, base.folder(machine.system))
        if lab.vm:
            vm.write_disk(machine)
    _write_control_files(lab)
    network.carry_out(network.plan(lab))
    node.wait_for_ssh(lab, {machine: node.boot(lab, machine) for machine in lab.nodes})
    saved = {**dataclasses.asdict(lab), "checkout": str(lab.checkout)}
    (lab.state / "lab.json").write_text(json.dumps(saved))
    print(f"lab {lab.name}: {lab.count} nodes answer ssh after {time.monotonic() - start:.1f} s")


def _write_control_files(lab: Lab) -> None:
    known_hosts = disk.known_hosts(lab)
    (lab.state / "known_hosts").write_text(known_hosts)
    if not lab.bare:
        (lab.state / "control.ssh/known_hosts").write_text(known_hosts)
    names = "".join(f"{machine.address}\t{machine.name}\n" for machine in lab.nodes)
    (lab.state / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{names}")
    for folder in ("cgroup", "ansible"):
        (lab.state / folder).mkdir()


def down(name: str) -> None:
    """Ends a lab, including one that is half made or whose nodes are frozen or dead."""
    group = cgroup.of(name)
    if cgroup.own().is_relative_to(group):
        cgroup.join(cgroup.mount_point())
    cgroup.kill(group)
    for netns in network.namespaces_of(name):
        network.remove(netns)
    cgroup.remove(group)
    disk.remove(name, DISKS)
    base.remove_unfinished(name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(STATE / name)
    for shared in (STATE, DISKS, group.parent):
        with contextlib.suppress(OSError):  # another lab uses it
            shared.rmdir()


def names_of(checkout: Path) -> list[str]:
    """The labs of a checkout."""
    names = sorted(path.parent.name for path in STATE.glob("*/lab.json"))
    return [name for name in names if load(name).checkout == checkout]


def exists(name: str) -> bool:
    """Whether anything of a lab exists, complete or not."""
    folders = (STATE / name, DISKS / name, cgroup.of(name))
    return any(folder.exists() for folder in folders) or bool(network.namespaces_of(name))


def status(lab: Lab) -> str:
    """A table of the nodes, at most 80 columns wide."""
    ports = network.ports(lab)
    kind = "bare " * lab.bare + "virtual " * lab.vm
    head = f"lab {lab.name}: {lab.count} {kind}nodes, Debian {', '.join(lab.releases)}"
    rows = [("node", "address", "state", "ssh", "rate")]
    for machine in lab.nodes:
        plugged, rate = ports[machine.port]
        answers = plugged and network.answers_ssh(lab, machine, connect=0.5, greet=1)
        state, ssh = node.state(lab, machine, plugged, answers), "yes" if answers else "no"
        rows.append((machine.name, machine.address, state, ssh, rate or "unshaped"))
    return "\n".join([head, *("{:<8}{:<17}{:<14}{:<5}{}".format(*row) for row in rows)])
