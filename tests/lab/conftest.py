"""Labs for the tests: brought up when first asked for, brought down at the end of the session."""

import itertools
import os
import re
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.by_group import ByGroup
from tests.lab import chaos_standin
from tests.lab.control_machine import Controller
from tests.lab.site_plays import draw_digits, gather_bundle
from tests.unit.launcher.guard_client import lives

CHECKOUT = Path(__file__).resolve().parents[2]
# Not the name of a lab that somebody runs by hand, nor of another checkout's tests.
PREFIX = f"test-{os.getpid()}"
PAIRS = itertools.count(1)
# Files of several minutes each, beyond what `make test-lab` may take: `make test-all` runs them,
# and the tests of other files that are marked long.
LONG = {
    "test_chaos_trainer.py",
    "test_frozen_disk.py",
    "test_guard_orphans.py",
    "test_lab_leftovers.py",
    "test_plan.py",
    "test_poweroff.py",
    "test_records.py",
    "test_script.py",
    "test_share_mounts.py",
    "test_share_ntfs.py",
    "test_site_driver_boot.py",
    "test_site_driver_runfile.py",
    "test_site_driver_vm.py",
    "test_site_keep.py",
    "test_site_network_managers.py",
    "test_site_offline.py",
    "test_site_oomd.py",
    "test_site_releases.py",
    "test_site_share.py",
    "test_site_toolkit.py",
    "test_site_toolkit_apex.py",
    "test_site_toolkit_pycharm.py",
    "test_site_uninstall.py",
    "test_site_whole.py",
    "test_slurm.py",
    "test_users.py",
}
# Files whose tests share machines, by the fixture that starts these once for all.
SHARED = {
    "test_lab_machines.py": "lab",
    "test_site.py": "bare",
    "test_site_verify.py": "bare",
    "test_train.py": "bare",
}


def pytest_sessionstart(session):
    """What ends the tests is Ctrl-C to them, so that they take their machines down: a closed
    terminal and SIGTERM, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    take_down_orphans(session.config)


def interrupt(*_):
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # once is enough
    raise KeyboardInterrupt


def pytest_unconfigure(config):
    take_down_orphans(config)


def take_down_orphans(config):
    """Ends the labs of tests whose process is gone: it was killed, perhaps by pytest itself, which
    does not wait for processes of its own for long."""
    if hasattr(config, "workerinput") or os.geteuid():
        return
    for path in Path("/run/tandem-lab").glob("test-*"):
        made_by = re.match(r"test-(\d+)-", path.name)
        if made_by and not lives(int(made_by[1])):
            argv = [sys.executable, "-m", "lab", "down", "--name", path.name]
            subprocess.run(argv, cwd=CHECKOUT, stdout=subprocess.DEVNULL, check=False)


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.lab)
        shared = {"bare", "lab"} & set(item.fixturenames) - {SHARED.get(item.path.name)}
        assert not shared or item.path.name in LONG, f"{item.nodeid} wants {shared}: see SHARED"
        if item.path.name in LONG:
            item.add_marker(pytest.mark.long)
    if here and os.geteuid():
        sentence = "lab tests boot machines, which needs root: sudo make test-lab"
        if os.environ.get("CI") == "true":
            raise pytest.UsageError(sentence)
        for item in here:
            item.add_marker(pytest.mark.skip(reason=sentence))


def pytest_xdist_make_scheduler(config, log):
    """One process runs all tests of a file, and all files that share machines, in order."""
    return ByGroup(config, log, SHARED)


@dataclass(frozen=True)
class RunningLab:
    """A lab by name; every method runs `python -m lab` as a user would."""

    name: str
    checkout: Path = CHECKOUT

    def argv(self, verb: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "lab", verb, "--name", self.name, *words]

    def __call__(self, verb: str, *words: str, check: bool = True, **options):
        """Runs a verb, as lab("kill", "3"), and captures its output; AssertionError if it fails."""
        options = {"capture_output": True, "text": True, "cwd": self.checkout, **options}
        done = subprocess.run(self.argv(verb, *words), **options)
        if check:
            assert done.returncode == 0, (
                f"{verb} {words}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def control(self, *command: str, **options):
        """Runs `command` on the control node."""
        return self("exec", "--", *command, **options)

    def stranger(self, *command: str, **options):
        return self("exec", "--from", "stranger", "--", *command, **options)

    def ssh(self, node: int, line: str, **options) -> str:
        """Standard output of a command line on a node."""
        return self("ssh", str(node), "--", line, **options).stdout

    def member(self, node: int, line: str, **options) -> str:
        """Like `ssh`, as the user that trains: on a bare machine, only after bootstrap."""
        return self.control("ssh", f"tandem@192.168.56.{110 + node}", line, **options).stdout

    def admin(self, node: int, line: str, **options) -> str:
        """Like `ssh`, as the user that provisions, who may use sudo."""
        return self.control("ssh", f"tandem-admin@192.168.56.{110 + node}", line, **options).stdout


def bootstrap(lab: RunningLab, folder: Path, nodes: list[int], fingerprint: str = ""):
    """Runs `make bootstrap` with a file of the nodes' own fingerprints, or of a wrong one."""
    own = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    rows = [f"node{node} {fingerprint or lab.ssh(node, own).split()[1]}\n" for node in nodes]
    (folder / "fingerprints").write_text("".join(rows))
    (folder / "password").write_text("lab\n")
    files = [f"--fingerprints={folder / 'fingerprints'}", f"--password-file={folder / 'password'}"]
    return lab.control("python", "ansible/bootstrap.py", "--login=student", *files, check=False)


@pytest.fixture(scope="session")
def new_lab():
    """new_lab("name") -> RunningLab that is not up yet; the session's end takes it down."""
    made = []

    def new(name: str, checkout: Path = CHECKOUT) -> RunningLab:
        # Numbered: two files of tests may choose the same name.
        made.append(RunningLab(f"{PREFIX}-{name}{len(made)}", checkout))
        return made[-1]

    yield new
    for lab in made:
        lab("down")


@pytest.fixture(scope="session")
def start_lab(new_lab):
    """start_lab("name", "--nodes", "2", ...) -> RunningLab that is up."""

    def start(name: str, *options: str) -> RunningLab:
        lab = new_lab(name)
        lab("up", *options)
        return lab

    return start


@pytest.fixture(scope="session")
def lab(start_lab) -> RunningLab:
    """Four machines at 1 Gbit/s, shared by all tests of the session: leave them as they were."""
    return start_lab("main", "--nodes", "4", "--rate", "1gbit")


@pytest.fixture(scope="session")
def bare(start_lab) -> RunningLab:
    """Four machines as an installer leaves them: a user with a password, and no key of ours."""
    return start_lab("bare", "--nodes", "4", "--bare")


@pytest.fixture(scope="session")
def let_in(bare, tmp_path_factory) -> RunningLab:
    """The bare machines after `make bootstrap`."""
    done = bootstrap(bare, tmp_path_factory.mktemp("bootstrap"), [1, 2, 3, 4])
    assert done.returncode == 1, done.stdout + done.stderr  # node5 is listed, but off
    return bare


@pytest.fixture(scope="session")
def provisioned(let_in) -> RunningLab:
    """The bare machines after bootstrap and site.yml."""
    gather_bundle("cpu")
    draw_digits()
    let_in.control("ansible-playbook", "site.yml")
    return let_in


@pytest.fixture
def pair(start_lab) -> RunningLab:
    """Two machines for one test alone, which may do with them what it likes."""
    made = start_lab(f"pair{next(PAIRS)}", "--nodes", "2", "--no-bundle")
    yield made
    made("down")


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(MiB) -> the folder of a disk that a test can fill."""
    made = []

    def make(size):
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "disk", folder]
        subprocess.run(mount, check=True)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def machines(start_lab, request) -> RunningLab:
    """NODES machines with a stand-in for the trainer, which the tests of a module share."""
    name = request.module.__name__.rpartition("test_")[2].replace("_", "-")
    made = start_lab(name, "--nodes", str(request.module.NODES), "--no-bundle")
    for node in range(1, request.module.NODES + 1):
        chaos_standin.install(made, node)
    return made


@pytest.fixture
def start(machines, tmp_path, request):
    """start(epochs, *words) -> a run on these machines, of steps of 0.1 s; on two 13 an epoch."""
    nodes, begun = request.module.NODES, []

    def begin(epochs, *words, **troubles):
        folder = tmp_path / f"run{len(begun)}"
        folder.mkdir()
        mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
        file = chaos_standin.inventory(folder, nodes, mark, step_seconds=0.1)
        asked = ("--inventory", str(file), "--data", "d", "--epochs", str(epochs), *words)
        begun.append(Controller(machines, folder, mark, *asked, **troubles))
        return begun[-1]

    yield begin
    machines("mend", str(nodes))
    for run in begun:
        run.close()
