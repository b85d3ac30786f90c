"""Nothing is left behind, however a lab ends."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lab import cgroup

CGROUPS = Path("/sys/fs/cgroup")
CHECKOUT = Path(__file__).resolve().parents[2]
BASES = Path("/var/cache/tandem-lab/bases")


def tree(*folders: Path) -> set[str]:
    return {
        str(Path(parent) / name)
        for folder in folders
        for parent, inner, files in os.walk(folder)
        for name in (*inner, *files)
    }


def command_of(process: Path) -> str:
    """Empty once it has ended, whether or not its parent has reaped it."""
    try:
        return (process / "cmdline").read_text(errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def traces() -> set[str]:
    """All that a lab could leave on this machine, one line each."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    interfaces = Path("/sys/class/net").iterdir()
    commands = set()
    for process in Path("/proc").glob("[0-9]*"):
        line = command_of(process)
        if "tandem-lab" in line:
            commands.add(f"process {process.name} {line}")
    files = tree(Path("/run"), Path("/var/lib/tandem-lab"), Path("~/.ssh").expanduser())
    # A base that is whole stays on purpose, for whichever lab made it.
    bases = map(str, BASES.glob("*.unfinished"))
    groups = {f"{group}/" for group in tree(CGROUPS) if Path(group).is_dir()}
    return {*mounts, *map(str, interfaces), *commands, *files, *bases, *groups}


class Traces:
    """What has appeared since, apart from what other labs on this machine did in the meantime."""

    def __init__(self):
        self.others = self.labs()
        self.before = traces()

    @staticmethod
    def labs() -> set[str]:
        return {folder.name for folder in Path("/run/tandem-lab").glob("*")}

    def left(self) -> list[str]:
        others = self.others | self.labs()
        shared = ("/tandem-lab", "/tandem-lab/")  # the folder of all labs
        new = (t for t in traces() - self.before if not t.endswith(shared))
        return sorted(t for t in new if not any(name in t for name in others))


@pytest.fixture
def before(lab):
    """`lab` was up before, so that the base exists."""
    return Traces()


def test_the_check_sees_a_lab(before, pair):
    name = pair.name
    mine = set(map(str.strip, traces() - before.before))
    for trace in (
        f"/run/netns/{name}-node1",
        f"/run/netns/{name}-control",
        f"/run/tandem-lab/{name}",
    ):
        assert trace in mine
    for part in (
        f"/var/lib/tandem-lab/{name}/node1/upper",
        f"/tandem-lab/{name}/node1/",
        "process ",
    ):
        assert any(part in trace for trace in mine), part


@pytest.mark.parametrize("trouble", [["kill", "freeze"], ["freeze", "cut"]])
def test_down_leaves_nothing(before, start_lab, trouble):
    lab = start_lab("ends", "--nodes", "2", "--no-bundle")
    for index, verb in enumerate(trouble, start=1):
        lab(verb, str(index))
    assert lab("down").stderr == ""
    assert before.left() == []


def test_down_ends_what_runs_on_the_control_machine(before, start_lab):
    """This includes processes detached from their caller, such as Ansible's open connections."""
    lab = start_lab("ends", "--nodes", "1", "--no-bundle")
    lab.control("sh", "-c", "setsid -f sleep 1000 >/dev/null 2>&1")
    pid = lab.control("pgrep", "-f", "^sleep 1000$").stdout.strip()
    lab("down")
    assert command_of(Path("/proc", pid)) == ""
    assert before.left() == []


def interrupt(lab, number: int, begun, *options: str) -> tuple[int, str]:
    """Sends `up` a signal as soon as `begun()`; its exit code and all that it said, to the end."""
    process = subprocess.Popen(
        # A shell makes what it runs in the background ignore Ctrl-C.
        ["env", "--default-signal=INT", *lab.argv("up", "--nodes", "2", "--no-bundle", *options)],
        cwd=lab.checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not begun():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.001)
    process.send_signal(number)
    return process.wait(), process.stdout.read()


STAGES = {
    "state": "/run/tandem-lab/{}",
    "disk": "/var/lib/tandem-lab/{}/node2",
    "namespace": "/run/netns/{}-control",
    "group": f"{cgroup.mount_point()}/tandem-lab/{{}}/node2",
    "console": "/run/tandem-lab/{}/node2.console",
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("stage", STAGES)
def test_up_that_is_ended_leaves_nothing(before, new_lab, stage, number):
    lab = new_lab("ends")
    code, said = interrupt(lab, number, Path(STAGES[stage].format(lab.name)).exists)
    assert code == (130 if number == signal.SIGINT else -number)
    assert said == ("lab: interrupted\n" if number == signal.SIGINT else "")
    assert before.left() == []


def test_up_that_fails_says_why_and_leaves_nothing(before, new_lab, tmp_path):
    lab = new_lab("ends")
    (tmp_path / "tc").write_text("#!/bin/sh\necho the kernel has no token bucket >&2\nexit 2\n")
    (tmp_path / "tc").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    failed = lab("up", "--rate", "1gbit", "--no-bundle", check=False, env=env)
    assert failed.returncode == 1
    assert failed.stderr.endswith(": the kernel has no token bucket\n")
    assert failed.stderr.count("\n") == 1
    assert before.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_making_the_base_that_is_ended_leaves_nothing(before, new_lab, tmp_path_factory, number):
    """A base with other contents is another base, so it has to be made first. The lab's checkout
    is needed until the session ends."""
    checkout = tmp_path_factory.mktemp("checkout")
    lab = new_lab("ends", checkout=checkout)
    shutil.copytree(CHECKOUT / "lab", checkout / "lab")
    (checkout / "ansible").mkdir()
    shutil.copy(CHECKOUT / "ansible/releases.yml", checkout / "ansible")
    recipe = checkout / "lab/base.py"
    recipe.write_text(
        recipe.read_text().replace("apt-get clean\n", f"apt-get clean # {lab.name}\n")
    )

    def downloading():
        return any(BASES.glob(f"*.{lab.name}.unfinished/var/cache/apt/archives/partial"))

    code, _ = interrupt(lab, number, downloading)
    assert code == (130 if number == signal.SIGINT else -number)
    assert before.left() == []


def test_leftovers_of_a_host_crash_do_not_hinder(before, new_lab):
    """/run is empty after a reboot, the disks are not."""
    lab = new_lab("ends")
    Path("/var/lib/tandem-lab", lab.name, "node1/upper").mkdir(parents=True)
    lab("up", "--nodes", "1", "--no-bundle")
    lab("down")
    assert before.left() == []
