"""One machine of two lies, in one way a run: the controller says so of that machine and no other,
and what the honest one wrote is here. The border's parsers meet a hundred generated lies each in
tests/unit/launcher/test_validate.py, what ranks record in tests/unit/report/test_odd_files.py; here
the whole launcher meets some of each way.
"""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import chaos_trial, liar
from tests.lab.chaos_run import CHECKOUT

NODES, LIAR = 2, 2
MIB = 1 << 20
PROFILE = "# the profile of whoever types\n"
# Small, so that what is larger is seen soon.
KEEP = ("--keep", "1")
OBEYED = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\\[[0-9;:]*m)")


@dataclass(frozen=True)
class Lie:
    """What the controller makes of one: its exit code, what it says, and, where the attempt failed,
    the first cause."""

    name: str
    says: str
    code: int = 1


def sent(what: str) -> str:
    return rf"tandem: the guard on node2, .*, ended: it sent something that no guard sends: {what}"


# The training waits for this one, so that nothing of it is said before.
AT_ONCE = "says nothing and drips"
SILENT = "tandem: node2 is gone: no heartbeat for 15 s"
MACHINE = r"machine\.1\.jsonl"
LEFT_OUT = "tandem: node2: nodes/node2/{} was not copied: "
ATTEMPTS = [
    Lie(AT_ONCE, SILENT),
    Lie(
        "lines that are no frames",
        r'tandem: the guard on node2, .*, ended: \[\[\[.* \["exit"\] "exit" null 7 ',
    ),
    Lie("a path for a record", sent(r"a record '\.\./\.\./.*\.bashrc' that it does not have")),
    Lie("a piece that comes twice", sent(r"byte \d+ of rank1\.1\.steps\.jsonl after byte \d+")),
    Lie("a path for a rank", sent(r"log frame\.rank: expected .*")),
    Lie("an exit of another host", "tandem: node2 could not run torch.distributed.launch"),
    Lie("finished while it trains", SILENT),
    Lie("escapes", "tandem: node2 could not run torch.distributed.launch: launch \x1b\\[31mred"),
    Lie("specials", LEFT_OUT.format(MACHINE) + "it is not a regular file on that machine", 0),
]
INVALID = "its answer is malformed: "
REFUSED = [
    Lie("an answer of wrong types", rf"{INVALID}answer\.cores: expected `int`", 2),
    Lie("a home of two lines", rf"{INVALID}answer\.home: expected `str` matching", 2),
    Lie("a holder with escapes", "in use by \x1b\\[31mred: run ", 2),
    Lie("an answer without end", "its answer is longer than 4 MiB", 2),
]
# `make test-lab` runs these and those before a run, which are the shortest.
SHORT = ("a piece that comes twice", "a path for a rank")


@pytest.fixture(scope="module")
def machines(machines):
    liar.install(machines, LIAR)
    return machines


@pytest.fixture
def precious(tmp_path):
    """A file of the control node that a liar knows by its path."""
    file = tmp_path / "precious"
    file.write_text(PROFILE)
    return file


@pytest.fixture
def start(start, machines, precious):
    """start(lie, epochs) -> a run in which node2 tells it."""

    def begin(lie, epochs, *words):
        liar.tell(machines, LIAR, lie, precious)
        return start(epochs, *KEEP, *words)

    yield begin
    liar.mend(machines, LIAR)


def outside(precious: Path) -> dict[str, bytes]:
    """What no machine has any business with here: the checkout, the user's own files."""
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    told = {"checkout": subprocess.run(status, cwd=CHECKOUT, capture_output=True).stdout}
    own = [precious, Path.home() / ".ssh/authorized_keys", *Path.home().glob(".*rc")]
    return told | {str(path): path.read_bytes() for path in own if path.is_file()}


def assert_clean(run) -> None:
    """Nothing of it lives on any machine, and its folder has files of the contract's names."""
    assert left_of(run) == []
    files = [path for path in run.folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert [path for path in files if path.is_symlink() or not path.is_file()] == []
    assert sum(path.stat().st_size for path in files) < 64 * MIB
    text = run.said() + (run.folder / "controller.log").read_text()
    assert not OBEYED.search(text), OBEYED.search(text)
    assert not re.search("^Traceback", text, re.M)
    told = [str(path.relative_to(run.folder)) for path in files]
    assert [name for name in told if not NAMES.fullmatch(name)] == []


OF_MACHINE = r"machine\.\d+\.jsonl|launch\.log"
NAMES = re.compile(
    r"(attempts|plan|summary)\.json|report\.(html|txt)|series\.csv|controller\.(log(\.first|\.\d)?|pid)|"
    r"nodes/node(1/rank0|2/rank1)\.(log(\.first|\.\d)?|\d+\.steps\.jsonl)|"
    rf"nodes/node[12]/({OF_MACHINE})|"
    r"samples/(rank0|rank1)\.[12]\.csv|checkpoints/node[12]/(best|step-\d+)\.pt"
)


def left_of(run) -> list[int]:
    """What lives of it when a guard without a controller has had its time."""
    limit = time.monotonic() + chaos_trial.ORPHANS
    while run.processes() and time.monotonic() < limit:
        time.sleep(0.05)
    return run.processes()


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lie, id=lie.name, marks=() if lie.name in SHORT else pytest.mark.long)
        for lie in ATTEMPTS
    ],
)
def test_a_lie_is_told_of_its_machine_alone(start, precious, lie):
    before = outside(precious)
    run = start(lie.name, 100 if lie.code else 1)
    assert (run.end(), bool(re.search(lie.says, run.said(), re.M))) == (lie.code, True), run.said()
    (attempt,) = run.attempts()
    assert attempt["status"] == ("failed" if lie.code else "finished")
    cause = attempt["first_cause"]
    if lie.code:
        assert cause["host"] == "node2" and "node1" not in cause["message"], cause
    assert not re.search("^tandem: node1(:.* not |.* (lost|is gone|could))", run.said(), re.M)
    assert_clean(run)
    # What the honest machine wrote is here, and is its own.
    node1 = run.folder / "nodes/node1"
    assert '"kind":"exit"' in (node1 / "machine.1.jsonl").read_text().splitlines()[-1]
    if lie.name != AT_ONCE:
        assert '"start"' in (node1 / "rank0.1.steps.jsonl").read_text()
        assert "step 2\n" in (node1 / "rank0.log").read_text()
        assert len((run.folder / "samples/rank0.1.csv").read_text().splitlines()) > 4
    assert (run.folder / "report.html").exists()
    assert outside(precious) == before


@pytest.mark.long
def test_whoever_waits_no_more_for_files_that_drip_is_obeyed_at_once(start):
    run = start("files by drips", 1)
    run.wait_for(r"\] step 13\n", 2)
    limit = time.monotonic() + 30
    while not [*run.folder.glob(".collect-*/file")]:
        assert time.monotonic() < limit and run.process.poll() is None, run.said()
    asked_at = time.monotonic()
    os.kill(run.controller, signal.SIGINT)
    run.end()
    assert time.monotonic() - asked_at < 4, run.said()
    assert f"make report RUN={run.name}" in run.said() and "Traceback" not in run.said()


@pytest.mark.long
def test_what_a_machine_links_to_is_neither_brought_nor_written(start, precious):
    """The names of its records and logs lead to the profile of whoever types; then the run goes on,
    and rank 1 prints into a log of that name."""
    before = outside(precious)
    run = start("links", 10, "--", "--checkpoint_every", "2")
    assert run.end() == 128 + 9, run.said()
    for name in ("nodes/node2/rank1.1.steps.jsonl", "samples/rank1.1.csv"):
        assert (
            f"node2: {name} was not copied: it is not a regular file on that machine" in run.said()
        )
    assert_clean(run)
    liar.mend(run.lab, LIAR)
    # Its own rank would trip over them.
    run.lab.ssh(LIAR, f"find tandem/runs/{run.name} -type l -delete")
    run.start("--resume", run.name)
    assert run.end() == 0, run.said()
    assert_clean(run)
    log = (run.folder / "nodes/node2/rank1.log").read_text()
    assert "step 3\n" in log and "step 130\n" in log and PROFILE not in log
    assert outside(precious) == before


@pytest.mark.parametrize("lie", REFUSED, ids=lambda lie: lie.name)
def test_a_lie_before_a_run_is_refused_by_the_name_of_its_machine(start, precious, lie):
    before = outside(precious)
    run = start(lie.name, 1)
    assert run.end() == lie.code, run.said()
    told = rf"^(tandem: )?node2 \(192\.168\.56\.112\): {lie.says}"
    assert re.search(told, run.said(), re.M), run.said()
    assert "Traceback" not in run.said() and "node1" not in run.said()
    assert not OBEYED.search(run.said())
    assert ", attempt 1" not in run.said()
    assert outside(precious) == before
