"""Files that none of our machines would write: the report is made from the others, in bounded time
and memory, and nothing of them reaches the terminal but printable text."""

import contextlib
import copy
import functools
import io
import json
import math
import operator
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report import files, read
from report.__main__ import main
from report.status import Follower, section_of
from report.text import section_lines
from tests.fuzz import damaged, many, odd, places
from tests.unit.report.report_runs import RunBuilder, change, change_lines

ROOT = Path(__file__).parents[3]
FILES = (
    "plan.json", "attempts.json", "nodes/node1/machine.1.jsonl", "nodes/node1/rank0.1.steps.jsonl",
)  # fmt: skip
OLDER = ROOT / "tests/older_run/20261125T013745Z-tiny-2n"
OLDER_FILES = tuple(
    f"nodes/node1/{name}"
    for name in (
        *("exit.json", "iostat.json", "net.jsonl", "gpu.jsonl", "mounts.jsonl", "machine.jsonl"),
        "rank0.steps.jsonl",
    )
)
RUNS = [*(("whole", name) for name in FILES), *(("older", name) for name in OLDER_FILES)]
RUNS += [("running", name) for name in FILES[2:]]


def test_a_folder_whose_name_is_no_text_is_no_host(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    for name in (b"caf\xe9", b"\x1b]0;x\x07", b"a\nb"):
        folder = run / "nodes" / os.fsdecode(name)
        folder.mkdir()
        for file in ("rank7.1.steps.jsonl", "machine.1.jsonl", "net.jsonl", "exit.json"):
            line = '{"kind": "start", "attempt": 1, "mono": 1.0, "attempts": [{}]}\n'
            (folder / file).write_text(line)
    assert main([str(run)]) == 0
    assert json.loads((run / "summary.json").read_text())["world_size"] == 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that has each kind of file, with what a failed one and its options add."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = RunBuilder(folder, nodes=2, steps=6, gpu=True, mounts=3.0)
    run.write()
    cause = {"host": "node1", "rank": 0, "message": "it fell", "remedy": "get up", "exception": "E"}
    run.write_control(status="failed", first_cause={**cause, "last_lines": ["a", "b"]})
    options = {"model": "resnet50", "batch": 32, "trainer": ["--lr", "0.1"]}
    predicted = {"images_per_second": 100.0, "made_unix": 1.0}
    change(folder / "plan.json", options=options, predicted=predicted)
    path = folder / "nodes/node1/rank0.1.steps.jsonl"
    more = {"exact": True, "longest": 20.0}
    change_lines(path, lambda line: {**line, **more} if line["kind"] == "step" else line)
    stall = json.dumps({"kind": "stall", "category": "forward", "step": 3, "idle": 6.0})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-2], stall, *lines[-2:], ""]))
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One that goes on: no rank and no guard has ended, and one epoch is evaluated."""
    run = RunBuilder(tmp_path_factory.mktemp("running") / "run", nodes=2, steps=24, epochs=4)
    run.write_control(status="running", wall_seconds=None)
    for rank, host in enumerate(run.hosts):
        run.write_rank(rank, host, steps=9, end=False)
        run.write_machine(rank, host)
        stall = {"kind": "stall", "category": "sync_exposed", "step": 9, "idle": 20.0}
        run.append(f"nodes/{host}/rank{rank}.1.steps.jsonl", [stall])
    return run.folder


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """One of before, with GPUs and a share."""
    run = Path(shutil.copytree(OLDER, tmp_path_factory.mktemp("older") / "run"))
    (middle,) = (run / "nodes/node1/net.jsonl").read_text().splitlines()[20:21]
    mono = json.loads(middle)["mono"]
    gpu = {"index": 0, "utilization": 9, "memory_used": 9, "temperature": 9, "power": 9.0}
    share = {"mount": "/d", "type": "nfs4"}
    for name, own in (("gpu", gpu), ("mounts", share)):
        lines = [{"attempt": 1, "mono": mono + n, "read_bytes": n, **own} for n in range(9)]
        write_lines(run / f"nodes/node1/{name}.jsonl", lines)
    return run


@pytest.fixture
def spoiled(request, whole, older, running):
    return {"whole": whole, "older": older, "running": running}[request.param]


def reported(run):
    """All that the report says and writes; it has to be printable, and JSON. What `make status`
    shows is made, too."""
    if progress := Follower(run).look():
        json.dumps([vars(one) for one in progress.machines], allow_nan=False)
        section_lines(section_of(progress, running=True))
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)  # as strict as a terminal
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([str(run)])
    said = out.buffer.getvalue().decode()
    assert code in (0, 2), said
    assert all(line.isprintable() for line in said.splitlines())
    if code == 0:
        json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
        assert len((run / "report.html").read_bytes()) < 300_000
        found = read.read_run(run)
        json.dumps([found.plan, found.attempts, found.status, found.missing], allow_nan=False)
        assert all(isinstance(host, str) for host in found.hosts)
    return said


@contextlib.contextmanager
def borrowed(path):
    """(bytes, JSON documents by line) of a file that is as it was afterwards."""
    good = path.read_bytes()
    try:
        yield good, [json.loads(line) for line in good.splitlines()]
    finally:
        path.write_bytes(good)


def write_lines(path, documents):
    path.write_text("\n".join(map(json.dumps, documents)))


@pytest.mark.hypothesis
@pytest.mark.parametrize(("spoiled", "name"), RUNS, indirect=["spoiled"])
def test_a_report_is_made_whatever_a_file_holds(spoiled, name):
    path = spoiled / name
    with borrowed(path) as (good, documents):

        @many(70)
        @given(odd(documents) | damaged(good))
        def each(made):
            path.write_bytes(made) if isinstance(made, bytes) else write_lines(path, made)
            reported(spoiled)

        each()


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", FILES[2:])
def test_a_run_that_goes_on_is_shown_whatever_its_lines_lack(running, name):
    path = running / name
    with borrowed(path) as (_, documents):
        for kind, key in sorted({(one["kind"], key) for one in documents for key in one}):
            for value in (None, 0, -1, "x", {}):
                alike = [{**one, key: value} if one["kind"] == kind else one for one in documents]
                write_lines(path, alike)
                if progress := Follower(running).look():
                    section_lines(section_of(progress, running=True))


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", FILES)
def test_a_run_is_read_whatever_a_part_of_a_first_line_is(whole, name):
    path = whole / name
    with borrowed(path) as (_, documents):
        for *at, key in places(documents[0]):
            made = copy.deepcopy(documents)
            functools.reduce(operator.getitem, at, made[0])[key] = 7
            write_lines(path, made)
            found = read.read_run(whole)
            json.dumps([found.plan, found.attempts, found.status], allow_nan=False)
            assert all(isinstance(host, str) for host in found.hosts)
            assert "cannot be read" not in str(found.missing)  # its other lines count


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", ["other", "attempts"])
def test_reports_of_disks_that_are_none_are_left_out(older, name):
    """Those of no attempt, and what is no report."""
    path = older / "nodes/node1/iostat.json"
    with borrowed(path):
        reports = {"sysstat": {"hosts": [{"statistics": [7, {}]}]}}
        path.write_text(json.dumps({name: [reports]}))
        assert reported(older)


def names_in(run):
    return [name for name in (*FILES, *OLDER_FILES) if (run / name).exists()]


def missing(path):
    path.unlink()


def huge(path):
    with path.open("ab") as file:
        file.truncate(9 << 20)


def half(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved").name)


def zero(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def another_rank(path):
    for name in ("rankx.1.steps.jsonl", "rank99999.1.steps.jsonl", "rank0.99999999999.steps.jsonl"):
        (path.parent / name).write_bytes(path.read_bytes())


CONTENTS = {
    "no text": b"\xff\xfe{",
    "deep": b'{"a": ' + b"[" * 200_000,
    "lists": b'["start"]\n[1]\n3\n',
    "surrogates": b'{"attempt": 1, "mono": 1.0, "interface": "\\ud800", "kind": "\\udfff"}\n',
    "no sense": b'null\n"x"\n{"kind": "step", "seconds": 3, "step": "x"}\n'
    b'{"kind": "step", "step": 9, "samples": NaN, "seconds": {"data": "a", "forward": Infinity}}\n'
    b'{"kind": "evaluate", "epoch": null}\n{"kind": "end", "mono": "late"}\n\x00\xff\n{"kin',
}


@pytest.mark.hypothesis
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("spoiled", ["whole", "older"], indirect=True)
def test_a_report_is_made_whatever_all_files_hold(spoiled, tmp_path, content, added):
    run = Path(shutil.copytree(spoiled, tmp_path / "run"))
    for name in names_in(run):
        before = (run / name).read_bytes() if added else b""
        (run / name).write_bytes(before + CONTENTS[content])
    reported(run)


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    "spoil", [missing, huge, half, a_folder, a_link, zero, a_pipe, another_rank]
)
@pytest.mark.parametrize("spoiled", ["whole", "older"], indirect=True)
def test_a_report_is_made_whatever_kind_its_files_are(spoiled, tmp_path, monkeypatch, spoil):
    """Each of them, and all; of these also where few steps and ranks are read."""
    every = names_in(spoiled)
    for number, names in enumerate([*([name] for name in every), every]):
        run = Path(shutil.copytree(spoiled, tmp_path / str(number)))
        for name in names:
            spoil(run / name)
        reported(run)
    for most in (1, 8):
        monkeypatch.setattr(read, "MOST_STEPS", most)
        monkeypatch.setattr(read, "MOST_RECORDS", most)
        reported(run)
    shutil.rmtree(run / "nodes")
    reported(run)


@many(60)
@given(st.data())
def test_a_plan_is_made_or_refused_whatever_a_run_holds(whole, data):
    path = whole / data.draw(st.sampled_from(FILES))
    with borrowed(path) as (_, documents):
        write_lines(path, data.draw(odd(documents)))
        out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(["plan", "--run", str(whole), "--runs", str(whole.parent / "plans")])
        assert code in (0, 2, 3)
        assert all(line.isprintable() for line in out.buffer.getvalue().decode().splitlines())


def test_a_number_that_no_file_of_a_run_has_counts_as_absent():
    for value in (1e18, -1e18, 2**63, math.inf, -math.inf, math.nan, True, "1"):
        assert files.number(value) is None
    for value in (0, -1, 0.5, 999_999_999_999_999_999, -9.9e17):
        assert files.number(value) is value


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", 10**17), ("steps_per_epoch", 10**400), ("image_size", 10**400)],
)
def test_numbers_that_no_run_has_are_absent(tmp_path, field, value):
    """Of 10**17 ranks each was looked for; a float holds no number of 400 digits. `²` is a digit to
    str.isdigit(), and none to int()."""
    run = RunBuilder(tmp_path / "run").write()
    change_lines(run / "nodes/node1/rank0.1.steps.jsonl", lambda line: {**line, field: value})
    workers = {"²": {}, "٣": {}, "-1": {}, "9" * 30: {}, "0": {}}
    path = run / "nodes/node2/machine.1.jsonl"
    change_lines(path, lambda line: {**line, "workers": workers})
    (run / "nodes/node2/rank1.1.steps.jsonl").unlink()
    assert main([str(run)]) == 0


NAME = "\x1b]0;title\x07\x1b]52;c;cHduZWQ=\x07\ud800sda\u202e"


def test_names_of_cards_disks_mounts_and_devices_tell_a_terminal_nothing(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True, mounts=3.0).write()
    keys = ("interface", "type", "device", "model", "sync", "precision")
    for path in run.glob("nodes/*/*.json*"):
        change_lines(path, lambda line: renamed(line, keys))
    said = reported(run)
    assert "sda" in said and "title" in said
    assert all(line.isprintable() for line in (run / "report.txt").read_text().splitlines())


def renamed(value, keys):
    if isinstance(value, list):
        return [renamed(one, keys) for one in value]
    if isinstance(value, dict):
        named = {"sda": NAME, "/srv/tandem/data": NAME}
        return {named.get(k, k): NAME if k in keys else renamed(v, keys) for k, v in value.items()}
    return value


def lines_of(path, line, megabytes):
    text = (json.dumps(line) + "\n") * (1 << 12)
    with path.open("a") as file:
        for _ in range((megabytes << 20) // len(text)):
            file.write(text)


def machine_lines(run, lines):
    with (run / "nodes/node1/machine.1.jsonl").open("a") as file:
        for number, line in enumerate(lines):
            line = {"kind": "sample", "mono": 120 + number / 1e6, **line}
            file.write(json.dumps(line) + "\n")


# 20,000 cards in 2 MB took 80 s, and more the more there are.
MANY = {
    "cards": lambda n: {"gpus": [{"index": n, "utilization": 1}]},
    "mounts": lambda n: {"mounts": {f"/{n}": {"read_bytes": 1}}},
    "peers": lambda n: {"card": {"peers": {f"{n}": {"from": "a", "sent": 1, "busy": 1.0}}}},
    "disks": lambda n: {"disks": {f"sd{n}": {"util": 1.0}}},
}


def samples(run):
    """A day or two of a machine with two disks."""
    path = run / "nodes/node1/machine.1.jsonl"
    line = json.loads(path.read_text().splitlines()[20])
    lines_of(path, line, 48)


def steps(run):
    line = {"kind": "step", "step": 1, "samples": 1, "seconds": {"data": 1e-6}}
    lines_of(run / "nodes/node1/rank0.1.steps.jsonl", line, 24)


def attempts(run):
    """As one file of before, and as many of now."""
    path = run / "nodes/node1/rank0.steps.jsonl"
    with path.open("a") as file:
        for attempt in range(20_000):
            file.write(json.dumps({"kind": "start", "attempt": attempt, "mono": 1.0}) + "\n")
    for attempt in range(2, 1000):
        path.with_name(f"rank0.{attempt}.steps.jsonl").write_text('{"kind": "start", "mono": 1}\n')
        path.with_name(f"machine.{attempt}.jsonl").write_text('{"kind": "sample", "mono": 1}\n')


def workers(run):
    line = {"kind": "exit", "mono_start": 1.0, "mono_end": 9.0}
    line["workers"] = {str(n): 0 for n in range(50_000)}
    machine_lines(run, [line] * 4)


def reports(run):
    """Of before."""
    document = json.loads((OLDER / "nodes/node1/iostat.json").read_text())
    statistics = document["attempts"][0]["sysstat"]["hosts"][0]["statistics"]
    statistics *= (24 << 20) // len(json.dumps(statistics)) + 1
    (run / "nodes/node1/machine.1.jsonl").unlink()
    (run / "nodes/node1/iostat.json").write_text(json.dumps(document))


LONG = [pytest.param(one, marks=pytest.mark.long) for one in (samples, steps, reports)]


@pytest.mark.parametrize("large", [*MANY, attempts, workers, *LONG])
def test_a_large_file_takes_neither_much_memory_nor_long(tmp_path, large):
    """300 MiB at most, and as long as it takes to parse each line a few times."""
    run = RunBuilder(tmp_path / "run", gpu=True, mounts=3.0).write()
    if large in MANY:
        machine_lines(run, map(MANY[large], range(20_000)))
    else:
        large(run)
    content = max((run / "nodes/node1").iterdir(), key=lambda path: path.stat().st_size)
    begin = time.process_time()
    for line in content.open():
        json.loads(line)
    parsing = time.process_time() - begin
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(run)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    kilobytes, seconds = map(float, done.stderr.split())
    assert kilobytes < 300 << 10
    assert seconds < 5 + 20 * parsing


# The report, then the most memory that it had and its seconds of computing.
MEASURED = """
import re, resource, sys
from report.__main__ import run_limited
code = run_limited(sys.argv[1:])
kilobytes = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]
print(kilobytes, resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)
sys.exit(code)
"""


def test_a_document_that_is_too_large_is_left_out_with_a_sentence(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    (run / "attempts.json").write_text("[" + "1," * (5 << 20) + "1]")
    assert main([str(run)]) == 0
    assert "attempts.json has 10 MiB; up to 8 are read" in (run / "report.txt").read_text()


def test_more_steps_than_are_kept_are_counted_and_said(tmp_path, monkeypatch):
    run = RunBuilder(tmp_path / "run").write()
    assert main([str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    monkeypatch.setattr(read, "MOST_STEPS", 40)
    assert main([str(run)]) == 0
    assert [len(one.steps) for one in read.read_run(run).ranks] == [10] * 4
    shorter = json.loads((run / "summary.json").read_text())
    assert shorter["seconds"] == summary["seconds"]
    assert shorter["images_per_second"] == pytest.approx(summary["images_per_second"])
    assert "of its first 10 steps" in " ".join((run / "report.txt").read_text().split())


@pytest.mark.parametrize("limit", ["MOST_MEMORY = 96 << 20", "MOST_SECONDS = 1"])
def test_the_report_has_limits_of_its_own(tmp_path, limit):
    run = RunBuilder(tmp_path / "run").write()
    if "MEMORY" in limit:
        (run / "plan.json").write_text("[" + "[]," * (5 << 19) + "1]")
    else:
        steps(run)
    code = f"import sys; from report import __main__ as m; m.{limit}; "
    code += "sys.exit(m.run_limited(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
