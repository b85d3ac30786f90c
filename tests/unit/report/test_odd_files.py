"""Files that none of our machines would write: the report is made from the others, in bounded time
and memory, and nothing of them reaches the terminal but printable text."""

import contextlib
import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from boundary import run_files
from boundary.run_files import MOST_PEERS
from launcher.watch import attempts
from report import files, read
from report.__main__ import main
from report.analysis import analyse
from report.figures import MOST_DEVICES
from report.status import Follower, machine_document, section_of
from report.text import section_lines
from tests.fuzz import PLAIN, WHOLE, damaged, many, odd
from tests.unit.report.report_runs import TRAINER, RunBuilder, change, change_lines

ROOT = Path(__file__).parents[3]
FILES = (
    "plan.json", "attempts.json", "nodes/node1/machine.1.jsonl", "nodes/node1/rank0.1.steps.jsonl",
)  # fmt: skip
RUNS = [*(("whole", name) for name in FILES[:2]), *(("running", name) for name in FILES[2:])]


def test_a_folder_whose_name_is_no_text_is_no_host(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    for name in (b"caf\xe9", b"\x1b]0;x\x07", b"a\nb"):
        folder = run / "nodes" / os.fsdecode(name)
        folder.mkdir()
        for file in ("rank7.1.steps.jsonl", "machine.1.jsonl"):
            line = '{"kind": "start", "attempt": 1, "mono": 1.0}\n'
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


@pytest.fixture
def spoiled(request, whole, running):
    return {"whole": whole, "running": running}[request.param]


def reported(run):
    """All that the report says and writes; it has to be printable, and JSON. What `make status`
    shows is made, too."""
    if progress := Follower(run).look():
        json.dumps([machine_document(one) for one in progress.machines], allow_nan=False)
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
        plain = to_builtins([found.plan, found.attempts, found.status, found.missing])
        json.dumps(plain, allow_nan=False)
        assert all(isinstance(host, str) for host in found.hosts)
        assert "records cannot be read" not in str(found.missing)
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
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))


def fields_of(documents):
    """Each kind of line with each of its fields."""
    return sorted({(one.get("kind"), key) for one in documents for key in one}, key=str)


def changed(documents, field, value):
    """All lines of a kind with another value of one field."""
    kind, key = field
    return [{**one, key: value} if one.get("kind") == kind else one for one in documents]


@pytest.mark.hypothesis
@pytest.mark.parametrize(("spoiled", "name"), RUNS, indirect=["spoiled"])
def test_a_report_is_made_whatever_a_file_holds(spoiled, name):
    path = spoiled / name
    with borrowed(path) as (good, documents):
        fields = st.sampled_from(fields_of(documents))
        alike = st.builds(changed, st.just(documents), fields, st.sampled_from(PLAIN))

        @many(70)
        @given(odd(documents) | damaged(good) | alike)
        def each(made):
            path.write_bytes(made) if isinstance(made, bytes) else write_lines(path, made)
            reported(spoiled)

        each()


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
def test_a_report_is_made_whatever_all_files_hold(whole, tmp_path, content, added):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for name in FILES:
        before = (run / name).read_bytes() if added else b""
        (run / name).write_bytes(before + CONTENTS[content])
    reported(run)


SPOILS = (missing, huge, half, a_folder, a_link, zero, a_pipe, another_rank)


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", range(len(SPOILS)))
def test_a_report_is_made_whatever_kind_its_files_are(whole, tmp_path, place):
    """All of them, and each alone: of one kind in `make test`, of every kind in the whole draw."""
    alone = FILES if WHOLE in os.environ else FILES[place :: len(SPOILS)]
    for number, names in enumerate([*([name] for name in alone), FILES]):
        run = Path(shutil.copytree(whole, tmp_path / str(number)))
        for name in names:
            SPOILS[place](run / name)
        reported(run)


@pytest.mark.parametrize("most", [1, 8])
def test_a_report_is_made_where_few_steps_and_ranks_are_read(whole, monkeypatch, most):
    monkeypatch.setattr(read, "MOST_STEPS", most)
    monkeypatch.setattr(read, "MOST_RECORDS", most)
    reported(whole)


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


def test_of_a_machine_so_many_devices_are_read(tmp_path):
    """20,000 cards in 2 MB took 80 s."""
    run = RunBuilder(tmp_path / "run").write()

    def many(line):
        if line["kind"] == "sample":
            pair = line["mono"] // 2  # every second line has others
            peers = {f"{n}": {"from": "a", "sent": 1, "busy": 1.0} for n in range(999)}
            line["gpus"] = [{"index": n, "utilization": 1} for n in reversed(range(99))]
            line["disks"] = {f"sd{n}-{pair}": {"util": 1.0} for n in range(99)}
            line["mounts"] = {f"/{n}-{pair}": {"read_bytes": 1} for n in range(99)}
            line["card"]["peers"] = peers
        return line

    change_lines(run / "nodes/node1/machine.1.jsonl", many)
    uses = analyse(run).uses
    gpus, disks, shares, networks = (
        [one for one in of if one.host == "node1"]
        for of in (uses.gpus, uses.disks, uses.shares, uses.networks)
    )
    assert [int(one.name) for one in gpus] == [*range(99 - MOST_DEVICES, MOST_DEVICES)]
    assert len(disks) == len(shares) == MOST_DEVICES
    assert len(networks[0].sent_to) == MOST_PEERS


def test_a_world_is_no_larger_than_a_world_may_be(tmp_path):
    """Of 10**17 ranks each was looked for."""
    builder = RunBuilder(tmp_path / "run")
    builder.write()
    builder.write_control(world_size=read.MOST_RANKS + 1)
    assert analyse(builder.folder).summary["world_size"] == 4


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


LONG = (
    ("machine.1.jsonl", {"kind": "sample", "mono": 120.0, "disks": {"sda": {}, "sdb": {}}}),
    ("rank0.1.steps.jsonl", {"kind": "step", "step": 1, "samples": 1, "seconds": {"data": 1e-6}}),
)


@pytest.mark.long
@pytest.mark.parametrize(("name", "line"), LONG)
def test_a_large_file_takes_little_memory(tmp_path, name, line):
    """A day or two of a machine: 300 MiB at most."""
    run = RunBuilder(tmp_path / "run").write()
    path = run / "nodes/node1" / name
    with path.open("a") as file:
        file.writelines((json.dumps(line) + "\n") * (1 << 12) for _ in range(100))
    assert path.stat().st_size > 24 << 20
    argv = [sys.executable, "-c", MEASURED, str(run)]
    done = subprocess.run(argv, cwd=ROOT, stdout=-3, stderr=-1, text=True, check=True)
    assert float(done.stderr) < 300 << 10


# The report, then the most memory that it had, in KiB.
MEASURED = """
import re, sys
from report.__main__ import run_limited
code = run_limited(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(code)
"""


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("begin", ["", '{"kind": "step"'])
def test_of_a_file_of_holes_its_own_bytes_are_read(tmp_path, begin):
    """An archive has 4 GiB of nothing in a few bytes; a power cut leaves the end of a file so."""
    path = tmp_path / "rank0.1.steps.jsonl"
    start = {"kind": "start", "attempt": 1, "resumed_samples": 8}
    path.write_text(f"{json.dumps(start)}\n" * 3 + begin)
    with path.open("ab") as file:
        file.truncate(files.LARGEST_FILE - 4096)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"kind": "end"}\n')
    grown, before = files.Growing(path), bytes_read()
    assert [*grown.lines(), *grown.lines()] == [start] * 3
    assert grown.bad == 1
    assert len([*attempts.read_record_lines(path, run_files.Start)]) == 3
    assert bytes_read() - before < 1 << 20


def test_a_document_that_is_too_large_is_left_out_with_a_sentence(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    (run / "attempts.json").write_text("[" + "1," * (5 << 20) + "1]")
    assert main([str(run)]) == 0
    assert "attempts.json has 10 MiB; up to 8 are read" in (run / "report.txt").read_text()


def slower_later(line):
    return {**line, "seconds": {**line["seconds"], "sync_exposed": 0.5}, "longest": 0.6}


@pytest.mark.parametrize("attempts", [1, 2])
def test_of_more_steps_than_are_kept_all_figures_are_those_of_all_steps(
    tmp_path, monkeypatch, attempts
):
    made = RunBuilder(tmp_path / "run", sync="ef:5", exact=30, exact_step={"sync_exposed": 0.1})
    run = made.write()
    for path in run.glob("nodes/*/rank*.jsonl"):
        change_lines(path, lambda line: slower_later(line) if line.get("step", 0) > 150 else None)
        if attempts == 2:
            path.with_name(path.name.replace(".1.", ".2.")).write_bytes(path.read_bytes())
    whole, live = analyse(run), Follower(run).look()
    monkeypatch.setattr(read, "MOST_STEPS", 100)
    thinned, still = analyse(run), Follower(run).look()
    assert all(4 < len(one.steps) <= 25 for one in thinned.run.ranks)
    for name in ("seconds", "steps", "bytes_sent_per_step", "bottleneck"):
        assert thinned.summary[name] == whole.summary[name], name
    pairs = (
        (thinned.summary["images_per_second"], whole.summary["images_per_second"]),
        (thinned.hundred_epochs, whole.hundred_epochs),
        (thinned.step.network, whole.step.network),
        (thinned.step.seconds, whole.step.seconds),
        (still.images_per_second, live.images_per_second),
    )
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs)
    assert (thinned.step.steps, thinned.step.warm_steps) == (240, 30)
    assert still.step == live.step == 240


def test_bytes_that_no_card_can_have_sent_are_left_out_and_said(tmp_path):
    run = RunBuilder(tmp_path / "run", speed_mbit=1000, sent=2e9).write()
    made = analyse(run)
    assert made.summary["bytes_sent_per_step"] is None
    assert [note for note in made.notes if note == made.step.contradiction]


@pytest.mark.parametrize("limit", ["MEMORY_LIMIT_BYTES = 96 << 20", "CPU_LIMIT_SECONDS = 1"])
def test_the_report_has_limits_of_its_own(tmp_path, limit):
    run = RunBuilder(tmp_path / "run").write()
    if "MEMORY" in limit:
        (run / "plan.json").write_text("[" + "[]," * (5 << 19) + "1]")
    else:
        with (run / "nodes/node1/rank0.1.steps.jsonl").open("a") as file:
            file.write((json.dumps(LONG[1][1]) + "\n") * 300_000)
    code = f"import sys; from report import __main__ as m; m.{limit}; "
    code += "sys.exit(m.run_limited(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_a_plan_that_gives_a_machine_no_ranks_has_a_report(whole, tmp_path):
    """A machine whose guard ended, and none of whose ranks was heard of."""
    run = tmp_path / "run"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("rank*"))
    plan = json.loads((run / "plan.json").read_text())
    change(run / "plan.json", nodes=[{"host": node["host"]} for node in plan["nodes"]])
    reported(run)


def test_tables_and_pages_hold_neither_formulas_nor_control_characters(tmp_path):
    """A class is a folder of a stranger's data set, and a host a folder of a stranger's run."""
    shown = {
        "=1+1": "'=1+1", "@a": "'@a", " -2+3": "' -2+3", "a;=1": "a;'=1",
        "\t=1": r"\t=1", "\x1b]0;x\x07": r"\x1b]0;x\x07", "a\u202egpj": r"a\u202egpj",
        "-1": "-1", "+2.5e-3": "+2.5e-3", "it's": "it's", "é\u00a0日": "é\u00a0日",
    }  # fmt: skip
    scores = {"images": 2, "top1": 0.5, "top5": 1.0, "loss": 0.1}
    confused = [{"name": name, "predicted": name, "images": 1} for name in shown]
    document = {
        "model": "m\u202e", "data": "d\x1b[2J", "precision": "fp32", "image_size": 32,
        "unreadable": 0, **scores, "classes": [{"name": name, **scores} for name in shown],
        "confused": confused,
    }  # fmt: skip
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(document))
    assert main(["evaluation", str(file)]) == 0
    for table in ("classes.csv", "confused.csv"):
        with (tmp_path / table).open(newline="") as lines:
            assert [row["class"] for row in csv.DictReader(lines)] == [*shown.values()]
    builder = RunBuilder(tmp_path / "run", model="m\x1b[2J\u202e")
    builder.hosts = ["=1", *builder.hosts[1:]]
    change(builder.write() / "plan.json", program={**TRAINER, "sample": "=1;"})
    assert main([str(tmp_path / "run")]) == 0
    with (tmp_path / "run/series.csv").open(newline="") as lines:
        begins = {cell[:3] for row in csv.DictReader(lines) for cell in (row["what"], row["of"])}
    assert {"'=1"} <= begins and "=1" not in {begin[:2] for begin in begins}
    for page in (tmp_path / "evaluation.html", tmp_path / "run/report.html"):
        assert not re.search("[\x1b\x9b\u202e]", page.read_text())
