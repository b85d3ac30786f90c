"""What readers of outside values take: memory of at most 30 times what they read, which is bounded,
and no time that grows faster than it."""

import contextlib
import io
import itertools
import json
import math
import os
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from boundary import frames, run_files
from boundary.answers import WorkFiles
from boundary.frames import Frames
from boundary.schema import Invalid
from contract import layout, runs
from contract.command_line import parse
from contract.errors import UserError
from contract.text import PARTS, SHORT, read_text
from launcher import control, folders, look, outputs, top
from launcher.background import Spool
from launcher.machines import inventory, ssh
from launcher.node import owner
from launcher.node import probe as machine
from launcher.plan import requirements, sources
from launcher.watch import guards
from planning import PlanError, stacks
from report import evaluation
from report.read import read_run
from report.status import Follower
from tests.unit.ansible.provision_machines import load
from tests.unit.launcher.test_validate import ANSWER, HELLO, KNOWN, TASK, wire
from tests.unit.report.report_runs import RunBuilder
from tools import sweep, verbs

dry = load("ansible/dry_provision.py")
JSON = ("[]", '"\\ud800"', '{"facts": {"host": "a"}}')
REFUSED = (UserError, PlanError, Invalid)


def array(part, size):
    return "[" + f"{part}," * (size // (len(part) + 1)) + "0]"


def within(name, part, size, **more):
    return json.dumps({**more, name: "HERE"}).replace('"HERE"', array(part, size))


def frame(path):
    frames = Frames((2, 3))
    frames.feed(wire(HELLO) + path.read_bytes() + b"\n")


def prediction(path):
    asked = runs.Setting("resnet50", 32, 224, "fp32")
    made = runs.prediction_path(path.parent, asked.model, 2)
    made.write_bytes(path.read_bytes())
    assert runs.prediction_in(runs.read_prediction(made), asked, 2) is None


def sweep_file(path):
    path.with_name("sweep.json").write_bytes(path.read_bytes())
    sweep.read_state(path.parent)


# Of each reader of a document: how it reads a file, and what the file holds.
DOCUMENTS = {
    "frames": (frame, lambda part, size: within("running", part, size, type="beat")),
    "answers": (
        lambda path: look.read_facts(path.read_text(), TASK),
        lambda part, size: within("models", part, size, **ANSWER),
    ),
    "plans": (
        lambda path: folders.read_json(path, run_files.Attempts),
        lambda part, size: within("attempts", part, size, status="x"),
    ),
    "predictions": (prediction, lambda part, size: within("rows", part, size)),
    "facts files": (dry.read_facts_file, array),
    "evaluations": (evaluation.read_evaluation, lambda part, size: within("classes", part, size)),
    "sweeps": (
        sweep_file,
        lambda part, size: within("cells", part, size, sweep="x", rounds=1, runs=[]),
    ),
    "foreign runs": (control.read_document, array),
}
# Others are measured in their own files of tests.


def memory_of(read, *what):
    """The most bytes that it has."""
    tracemalloc.start()
    try:
        read(*what)
    except REFUSED as error:
        assert len(str(error)) < 5000
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize(("name", "part"), list(itertools.product(DOCUMENTS, JSON)))
def test_memory_is_bounded_by_what_is_read(tmp_path, name, part):
    read, made = DOCUMENTS[name]
    path, size = tmp_path / "file.json", 1 << 17
    path.write_text(made(part, size))
    assert memory_of(read, path) < 30 * size + (1 << 18)  # of libraries, where they are first used


@pytest.mark.parametrize("part", ["[],", "a: {b: c},"])
def test_yaml_is_short(tmp_path, part):
    """As many parts as are taken, and as many as there is room for."""
    for count in (PARTS // 5, SHORT // len(part) - 9):
        text = f"epochs: [{part * count}]"
        assert len(text) < SHORT
        assert memory_of_yaml(tmp_path, text) < 30 * SHORT


def memory_of_yaml(tmp_path, text):
    """What a recipe and a file of the stack's take, which hold this text."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    every = (lambda: parse(["--config", str(path)]), lambda: stacks.read_decision(text, "here"))
    return max(map(memory_of, every))


def test_a_few_lines_of_yaml_fill_no_memory(tmp_path):
    """378 characters of lists of merges took 92 MiB, and two lines more would take 7 GiB."""
    merges = [f"x{n}: &x{n} {{<<: [{','.join([f'*x{n - 1}'] * 9)}]}}" for n in range(1, 8)]
    text = "\n".join(["x0: &x0 {a: 1}", *merges])
    assert memory_of_yaml(tmp_path, text) < 30 * SHORT
    with pytest.raises(UserError, match=r"repeats a part by an alias, \*x0: write it out"):
        parse(["--config", str(tmp_path / "recipe.yaml")])


def test_lines_of_known_hosts_and_words_take_what_they_are():
    size = 1 << 14
    for text in (KNOWN + b"\n", b"\n", b"a b c\n"):
        assert memory_of(ssh.read_known_hosts, text * (size // len(text))) < 30 * size
    for word in ("x" * size, "--a " * (size // 4), "'" * size):
        assert memory_of(verbs.options, "train", {"TANDEM_GIVEN": "ARGS", "ARGS": word}) < 30 * size


def an_answer(folder, count):
    text = json.dumps({**ANSWER, "models": ["a"] * (count // 10)})
    return lambda: look.read_facts(text, TASK)


def a_flood_of_beats(folder, count):
    beat = {"type": "beat", "unix": 1.0, "running": [2, 3], "disk_free": None}
    lines = wire(HELLO, *[beat] * (count // 10))
    return lambda: list(Frames((2, 3)).feed(lines))


def an_inventory(folder, count):
    hosts = {f"n{n}": {"ansible_host": f"10.0.0.{n}"} for n in range(count // 160)}
    document = {"_meta": {"hostvars": hosts}, "cluster": {"hosts": list(hosts)}}
    return lambda: inventory.parse(document, Path("inventory.ini"))


def known_hosts(folder, count):
    return lambda: ssh.read_known_hosts((KNOWN + b"\n") * (count // 5))


def a_run_of_many_lines(folder, count):
    run = RunBuilder(folder / "run").write()
    line = {"kind": "step", "samples": 1, "seconds": {"data": 1.0}}
    with (run / "nodes/node1/rank0.1.steps.jsonl").open("a") as file:
        file.writelines(json.dumps({**line, "step": number}) + "\n" for number in range(count))
    return lambda: read_run(run)


def a_run_of_many_files(folder, count):
    run = RunBuilder(folder / "run").write()
    for number in range(2, count // 40):
        for name in (f"rank0.{number}.steps.jsonl", f"machine.{number}.jsonl"):
            (run / "nodes/node1" / name).write_text('{"kind": "start", "mono": 1.0}\n')
    return lambda: read_run(run)


def a_machine(folder, count):
    """Its last lines, which are kept."""
    line = {"kind": "sample", "mono": 1.0, "cpu_busy": 1.0, "gpus": [{}], "disks": {"sda": {}}}
    path = folder / "nodes/node1/machine.1.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text((json.dumps(line) + "\n") * count)
    return lambda: Follower(folder).look()


def pieces(folder, count):
    """What a guard sends of one file."""
    plan = SimpleNamespace(attempt=1, nodes=[SimpleNamespace(host="node1", ranks=(0,))])

    def read():
        copies = guards.Records(plan, folder, Spool(), 1 << 30)
        for number in range(count // 10):
            frame = frames.Record("machine.1.jsonl", 2 * number, 2)
            copies.take("node1", frame, b"{\n")

    return read


def a_data_set(folder, count):
    for number in range(count // 40):
        for split in ("train", "val"):
            (folder / split / f"c{number}").mkdir(parents=True)
            (folder / split / f"c{number}" / "0.png").touch()

    def read():
        layout.read_split(folder, "train")
        assert machine.describe_data_set(str(folder), "images", folder / "node")["problem"] is None

    return read


def a_checkpoint(folder, count):
    torch, checkpoint = pytest.importorskip("torch"), pytest.importorskip("trainer.checkpoint")
    content = io.BytesIO()
    torch.save({str(number): torch.zeros(1) for number in range(count // 20)}, content)
    return lambda: checkpoint.load("it", io.BytesIO(content.getvalue()))


def a_listing(folder, count):
    answer = WorkFiles([(f"out/{number}.pt", 1, 5) for number in range(count)], count, {})
    return lambda: outputs.check_listing(answer, ("out",))


def what_programs_print(folder, count):
    printed = "# pid sm\n" + "7 99\n" * count
    return lambda: owner.gpu_pids(lambda argv: printed)


def what_a_machine_tells(folder, count):
    line = b'{"kind": "sample", "mono": 1.0}\n'
    one = top.IdleMachine(SimpleNamespace(name="node1"), SimpleNamespace())

    def look():
        pieces = [line * 100] * (count // 100)
        one.process.read = lambda: pieces.pop() if pieces else None
        while pieces:
            one.look()

    return look


def a_list_of_packages(folder, count):
    path = folder / "requirements.txt"
    path.write_text("tool==1\n" * count)
    return lambda: requirements.read_requirements(path)


def a_source(folder, count):
    path = folder / "train.py"
    path.write_text("import torch\n" * (count // 2))
    return lambda: sources.find_loaded(path, [folder])


def a_log(folder, count):
    (folder / "controller.log").write_text("one\x1b[2J\n" * count)

    def show():
        with contextlib.redirect_stdout(io.StringIO()):
            control.follow(folder, 0)

    return show


def a_document(name):
    read, made = DOCUMENTS[name]

    def written(folder, count):
        path = folder / "file.json"
        path.write_text(made('{"":0}', 10 * count))
        return lambda: refused_or(read, path)

    return written


def refused_or(read, path):
    with contextlib.suppress(*REFUSED):
        read(path)


GROWING = {
    "outputs": a_listing,
    "owners": what_programs_print,
    "top": what_a_machine_tells,
    "scripts: packages": a_list_of_packages,
    "scripts: imports": a_source,
    "foreign runs": a_log,
    "frames": a_flood_of_beats,
    "facts": an_answer,
    "inventories": an_inventory,
    "known hosts": known_hosts,
    "records: steps": a_run_of_many_lines,
    "records: files": a_run_of_many_files,
    "records: machines": a_machine,
    "records: pieces": pieces,
    "data sets": a_data_set,
    "checkpoints": a_checkpoint,
}
GROWING.update((name, a_document(name)) for name in DOCUMENTS)
TIMES, MOST = 8, 24  # linear readers take 8 times as long, quadratic ones 64 times


def times_as_long(read, read_more):
    """How many times as long `read_more` computes. Both are tried in turns, so that a busy machine
    slows both, and the least of each counts; again where it seems too long."""
    least = {read: math.inf, read_more: math.inf}
    for _ in range(9):
        for one in least:
            begin = time.thread_time()
            one()
            least[one] = min(least[one], time.thread_time() - begin)
        if least[read_more] < MOST * least[read]:
            break
    return least[read_more] / least[read]


@pytest.mark.parametrize("name", GROWING)
def test_eight_times_as_much_takes_not_much_longer_than_eight_times(tmp_path, name):
    """Of the reading thread's time: what a spool's thread writes meanwhile is another time each
    time."""
    readers = []
    for count in (1_000, 1_000 * TIMES):
        (tmp_path / str(count)).mkdir()
        readers.append(GROWING[name](tmp_path / str(count), count))
    readers[0]()  # whatever is imported then
    assert times_as_long(*readers) < MOST


def test_a_reader_that_takes_the_square_is_noticed():
    few, many = ([str(n) for n in range(count)] for count in (200, 200 * TIMES))
    assert times_as_long(*(lambda of=of: [one in of for one in of] for of in (few, many))) > MOST


@pytest.mark.parametrize("name", ["/dev/zero", "sparse", "pipe"])
def test_what_is_larger_is_refused(tmp_path, name):
    path = tmp_path / name  # an absolute name stays
    if name == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif name == "pipe":
        os.mkfifo(path)  # it would be waited for
    for read in (
        lambda: read_text(path),
        lambda: folders.read_json(path, run_files.Attempts),
        lambda: parse(["--config", str(path)]),
        lambda: dry.read_facts_file(path),
    ):
        with pytest.raises((*REFUSED, ValueError), match=r"has more than [\d,]+ KiB|no regular"):
            read()
    with pytest.raises(PlanError, match="does not contain the stack"):
        stacks.read_decision("stack: cu126\n" + " " * SHORT, "here")
    assert json.loads(json.dumps(stacks.read_decision("stack: cu126", "here")))["stack"] == "cu126"
