"""What a script wrote into its OUTPUT= folders, as a machine lists and sends it."""

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract.errors import UserError
from launcher import checkpoints, collect, outputs
from launcher.machines.local import LocalNode
from tests.unit.launcher.launcher_values import host

HOSTS = {n: host(n, connection="local", address="127.0.0.1") for n in (1, 2)}


@pytest.fixture
def nodes():
    return {one.name: LocalNode(one) for one in HOSTS.values()}


@pytest.fixture
def there(tmp_path):
    """The run's folder on each of two machines."""
    made = {}
    for one in HOSTS.values():
        (tmp_path / one.name / "work" / one.name / "out").mkdir(parents=True)
        made[one.name] = str(tmp_path / one.name)
    return made


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def wrote(there, name, path, text="x", at=0):
    file = Path(there[name], "work", name, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(file, (at, at))


def here(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())


def names(nodes, there):
    held = checkpoints.held_by(nodes, there, ("out",))
    return {host: list(kept) for host, kept in held.items()}


def candidates(nodes, there, run, say=lambda said: None, unfit=()):
    held = checkpoints.held_by(nodes, there, ("out",))
    return checkpoints.Candidates(held, nodes, there, run, say, unfit)


def spread(nodes, there, run, room=1 << 20, *more):
    return candidates(nodes, there, run, *more).spread(room)


def safe(size=4):
    """A .safetensors with one tensor."""
    head = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (size // 4, size)
    return len(head).to_bytes(8, "little") + head + bytes(size)


def test_the_folders_that_were_named_come_from_every_machine(nodes, there, run):
    wrote(there, "node1", "out/deep/a.txt", "one")
    wrote(there, "node2", "out/a name with spaces.txt", "two")
    wrote(there, "node2", "secret.txt")
    Path(there["node1"], "work/node1/out/linked").symlink_to(Path(there["node2"], "work"))
    Path(there["node1"], "work/node1/out/link.txt").symlink_to("deep/a.txt")
    said = outputs.bring(nodes, there, ("out", "missing"), run, 1 << 20, {})
    assert here(run) == ["work/node1/out/deep/a.txt", "work/node2/out/a name with spaces.txt"]
    assert (run / "work/node1/out/deep/a.txt").read_text() == "one"
    assert said == ["node1: 1 file in work/node1", "node2: 1 file in work/node2"]


def test_without_a_name_all_that_is_new_or_changed_comes_once(nodes, there, run):
    sent = {"train.py": (1, 5), "notes.txt": (1, 5)}
    for name in there:
        wrote(there, name, "train.py", at=5)
        wrote(there, name, "notes.txt", at=6)
        wrote(there, name, "__pycache__/train.pyc")
        wrote(there, name, "a/result.txt", name)
    said = outputs.bring(nodes, there, (), run, 1 << 20, sent)
    names = ("a/result.txt", "notes.txt")
    assert here(run) == [*(f"work/node1/{name}" for name in names), "work/node2/a/result.txt"]
    assert said[-1].startswith("node2: 1 file equal")


def test_a_machine_brings_so_many_bytes_the_newest_first(nodes, there, run):
    wrote(there, "node1", "out/old.pt", "o" * 600, at=1)
    wrote(there, "node1", "out/new.pt", "n" * 600, at=2)
    said = outputs.bring(nodes, there, ("out",), run, 1000, {})
    assert here(run) == ["work/node1/out/new.pt"]
    assert any("out/old.pt was not collected: with it this machine's files" in one for one in said)


class Lists(LocalNode):
    """A machine that answers a listing with these names."""

    names = ()

    def start(self, argv):
        if "find" in argv[2]:
            text = "\\000".join(f"5.0 1 {name}\\tout" for name in self.names)
            return super().start(["printf", text])
        return super().start(argv)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/../../x", "", "a\x1b[2J", "a/./b", "/".join("a" * 40)]
)
def test_a_name_that_leads_elsewhere_is_no_file(nodes, there, run, name):
    """Nor is one that is a folder's, too."""
    liar = Lists(HOSTS[1])
    liar.names = (name.replace("\x1b", "\\033"), "b", "b/c", "good.txt")
    wrote(there, "node1", "out/b/c")
    wrote(there, "node1", "out/good.txt")
    outputs.bring({**nodes, "node1": liar}, there, ("out",), run, 1000, {})
    assert here(run) == ["work/node1/out/good.txt"]


@pytest.mark.parametrize(("before", "after"), [("a", "a/b.txt"), ("a/b.txt", "a")])
def test_what_was_a_file_and_is_a_folder_is_that_file_s_trouble(nodes, there, run, before, after):
    """Of a run that goes on; not a disk that is full, by which nothing more would be brought."""
    wrote(there, "node1", f"out/{before}")
    outputs.bring(nodes, there, ("out",), run, 1 << 20, {})
    shutil.rmtree(Path(there["node1"], "work/node1/out"))
    wrote(there, "node1", f"out/{after}", at=2)
    wrote(there, "node1", "out/c.txt", at=1)
    said = outputs.bring(nodes, there, ("out",), run, 1 << 20, {})
    assert here(run) == [f"work/node1/out/{before}", "work/node1/out/c.txt"]
    assert any(f"out/{after} was not collected: here something else has its na" in s for s in said)


def planted(*_):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("reader", ["_read", "move_in", "receive"])
def test_whatever_a_reader_of_one_machine_raises_the_other_s_files_come(
    nodes, there, run, monkeypatch, reader
):
    """An exception that nobody foresaw."""
    real = getattr(outputs, reader)

    def once(*given):
        if len(calls) == 0:
            calls.append(given)
            planted()
        return real(*given)

    calls = []
    monkeypatch.setattr(outputs, reader, once)
    wrote(there, "node1", "out/a.pt")
    wrote(there, "node2", "out/a.pt", "another")
    said = outputs.bring(nodes, {"node1": there["node1"]}, ("out",), run, 1 << 20, {})
    assert "not collected: " in said[0] and "ZeroDivisionError: planted" in said[0]
    outputs.bring(nodes, there, ("out",), run, 1 << 20, {})
    assert here(run) == ["work/node1/out/a.pt", "work/node2/out/a.pt"]
    calls.clear()
    assert checkpoints.held_by(nodes, there, ("out",))["node2"]


def test_more_files_than_a_run_takes_are_counted(nodes, there, run, monkeypatch):
    monkeypatch.setattr(outputs, "MOST_FILES", 2)
    for number in range(4):
        wrote(there, "node1", f"out/{number}", at=number)
    told = outputs.bring(nodes, there, ("out",), run, 1000, {})
    assert here(run) == ["work/node1/out/2", "work/node1/out/3"]
    assert any("2 older files stay there" in one for one in told)


def test_every_machine_has_the_newest_checkpoint_before_the_next_attempt(nodes, there, run):
    wrote(there, "node1", "out/1.pt", "old", at=1)
    wrote(there, "node1", "out/2.pt", "new", at=2)
    wrote(there, "node1", "out/log.txt", at=3)
    wrote(there, "node2", "out/9.pt", "another clock", at=9)
    assert names(nodes, there) == {"node1": ["out/2.pt", "out/1.pt"], "node2": ["out/9.pt"]}
    assert spread(nodes, there, run, 1000) == "out/2.pt"
    assert Path(there["node2"], "work/node2/out/2.pt").read_text() == "new"
    assert here(run) == []  # nothing half-done is left here


def test_a_checkpoint_that_does_not_come_is_passed_over(nodes, there, run):
    wrote(there, "node1", "out/2.pt", "too large")
    wrote(there, "node2", "out/1.pt", "fits")
    assert spread(nodes, there, run, 5) == "out/1.pt"
    assert spread(nodes, there, run, 2) is None
    assert spread(nodes, {}, run, 100) is None


def test_a_machine_that_cannot_take_it_is_named(nodes, there, run):
    wrote(there, "node1", "out/2.pt", "new")
    out = Path(there["node2"], "work/node2/out")
    out.rmdir()
    out.symlink_to("/proc/nowhere")
    with pytest.raises(UserError, match="node2: the checkpoint could not be written to "):
        spread(nodes, there, run, 1000)


def test_a_file_that_runs_no_code_is_taken_where_there_is_one_of_the_same_step(nodes, there, run):
    for number, end in enumerate((".safetensors", ".pt", ".ckpt")):
        wrote(there, "node1", f"out/2{end}", safe(), at=5 + number)
    wrote(there, "node1", "out/1.safetensors", safe(), at=1)
    wrote(there, "node1", "out/parts/2.safetensors", safe(), at=2)
    assert spread(nodes, there, run, 1000) == "out/2.safetensors"
    assert names(nodes, there)["node1"][-1] == "out/1.safetensors"
    wrote(there, "node1", "out/3.pt", "newer", at=9)
    assert spread(nodes, there, run, 1000) == "out/3.pt"


def test_each_machine_may_go_on_from_a_file_of_its_own(nodes, there, run):
    """The newest that all have: of the last one a machine may have written half."""
    assert candidates(nodes, there, run).own() is None
    for number in (1, 2):
        wrote(there, "node1", f"out/{number}.pt", "one", at=number)
    with pytest.raises(UserError, match="node2 has none"):
        candidates(nodes, there, run).own()
    wrote(there, "node2", "out/3.pt", "two", at=3)
    with pytest.raises(UserError, match="no intact one is on all machines"):
        candidates(nodes, there, run).own()
    wrote(there, "node2", "out/2.pt", archive()[:-30], at=2)
    wrote(there, "node2", "out/1.pt", "two", at=1)
    assert candidates(nodes, there, run).own() == "out/1.pt"
    assert Path(there["node1"], "work/node1/out/1.pt").read_text() == "one"
    assert Path(there["node2"], "work/node2/out/1.pt").read_text() == "two"


def archive():
    """As torch.save writes it, with one value."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"step": 7}, protocol=2))
        file.writestr("archive/data/0", bytes(4000))
    return whole.getvalue()


@pytest.mark.parametrize(
    ("name", "whole", "half"),
    [
        ("out/7.pt", archive(), archive()[:-30]),
        ("out/7.pt", b"x", b""),
        ("out/7.safetensors", safe(), safe()[:-1]),
        ("out/7.safetensors", safe(), safe()[:20]),
    ],
)
def test_the_newest_that_is_whole_is_taken(nodes, there, run, name, whole, half):
    """Half a file beside an older one would end each further attempt."""
    wrote(there, "node1", "out/6.safetensors", safe(), at=6)
    for content, taken in ((half, "out/6.safetensors"), (whole, name)):
        wrote(there, "node1", name, content, at=7)
        said = []
        assert spread(nodes, there, run, 1 << 20, said.append) == taken
        assert any(one.startswith(f"node1: {name} ") for one in said) == (content == half)


def test_a_copy_that_is_whole_is_taken_from_another_machine(nodes, there, run):
    for name, size in (("node1", 3), ("node2", 4)):
        wrote(there, name, "out/7.safetensors", safe()[: len(safe()) - 4 + size], at=7)
    wrote(there, "node1", "out/6.pt", at=6)
    assert spread(nodes, there, run) == "out/7.safetensors"
    assert Path(there["node1"], "work/node1/out/7.safetensors").read_bytes() == safe()


def accelerates(there, node, name, files, at):
    for file in files:
        wrote(there, node, f"out/{name}/{file}", safe() if "model" in file else "x", at=at)


STATE = ("model.safetensors", "optimizer.bin", "random_states_0.pkl")


@pytest.mark.parametrize(("older", "newer"), [("checkpoint_1", "checkpoint_2"), ("a", "b")])
def test_a_folder_that_is_a_checkpoint_is_taken_whole(nodes, there, run, older, newer):
    """As Accelerate's save_state writes it: each rank its random state, on its own machine."""
    accelerates(there, "node1", older, STATE, at=1)
    accelerates(there, "node1", newer, STATE, at=2)
    accelerates(there, "node2", newer, ("random_states_1.pkl",), at=2)
    wrote(there, "node1", "out/log.txt", at=3)
    assert spread(nodes, there, run) == f"out/{newer}"
    other = Path(there["node2"], "work/node2/out", newer)
    assert sorted(file.name for file in other.iterdir()) == sorted((*STATE, "random_states_1.pkl"))
    accelerates(there, "node1", "checkpoint_3", STATE[:2], at=3)  # killed before the last file
    assert spread(nodes, there, run) == f"out/{newer}"


def test_folders_that_hold_checkpoints_are_none(nodes, there, run):
    wrote(there, "node1", "out/version_0/checkpoints/epoch=1-step=9.ckpt", at=1)
    wrote(there, "node1", "out/run_2/last.pth.tar", at=2)
    wrote(there, "node1", "out/step_3/notes.txt", at=3)
    kept = ["out/run_2/last.pth.tar", "out/version_0/checkpoints/epoch=1-step=9.ckpt"]
    assert names(nodes, there)["node1"] == kept


def test_what_a_rank_keeps_for_its_sums_is_no_checkpoint(nodes, there, run):
    torch = pytest.importorskip("torch")
    attach = pytest.importorskip("tandem.sync.attach")
    kept = attach.Attached.__new__(attach.Attached)
    topology = SimpleNamespace(nodes=[0, 1])
    sync = SimpleNamespace(topology=topology, state_dict=lambda: {"error": torch.zeros(9)})
    sync.settle, kept.usage = lambda unused: None, None
    model = SimpleNamespace(module=None)
    sync.common_state, kept._model = lambda _: {}, lambda: model
    kept.scaled, kept.steps, kept.sync = "ef:3:peak", 3, sync
    folder = Path(there["node1"], "work/node1/out")
    torch.save({"model": {}, "kept": kept.state_dict()}, folder / "6.pt")
    os.utime(folder / "6.pt", (6, 6))
    for zipped in (True, False):
        torch.save(kept.state_dict(), folder / "ef-rank0.pt", _use_new_zipfile_serialization=zipped)
        said = []
        assert spread(nodes, there, run, 1 << 20, said.append) == "out/6.pt"
        assert said == []
        assert not Path(there["node2"], "work/node2/out/ef-rank0.pt").exists()


def test_from_what_a_script_could_not_go_on_it_goes_on_last(nodes, there, run):
    for number in (1, 2, 3):
        wrote(there, "node1", f"out/{number}.pt", at=number)
    unfit = []
    for taken in ("out/3.pt", "out/2.pt", "out/1.pt", "out/3.pt"):
        assert spread(nodes, there, run, 1 << 20, lambda said: None, unfit) == taken
        unfit.append(taken)


def test_the_newest_that_arrives_is_handed_on(tmp_path, nodes, run, monkeypatch):
    """Of the trainer's checkpoints: node1 names the newest, but holds nothing of that name."""
    where, given = {}, []
    for name, steps in (("node1", (9,)), ("node2", (3, 7))):
        folder = tmp_path / name / "checkpoints" / name
        folder.mkdir(parents=True)
        for step in steps:
            (folder / f"step-{step:08}.pt").write_text(f"{name} {step}")
        where[name] = str(tmp_path / name)
    newest = tmp_path / "node1/checkpoints/node1/step-00000009.pt"

    def give(file, size, name):
        given.append((file.read_text(), size, name))

    assert collect.hand_on(nodes, where, run, give)
    newest.unlink()
    newest.mkdir()
    assert collect.hand_on(nodes, where, run, give)
    assert given == [
        ("node1 9", 7, "step-00000009.pt"),
        ("node2 7", 7, "step-00000007.pt"),
    ]
    assert not collect.hand_on({}, where, run, give)
    monkeypatch.setattr(collect, "disk_free", lambda: collect.DISK_LEFT + 6)
    assert not collect.hand_on(nodes, where, run, give) and len(given) == 2  # no room here
