"""What a script wrote into its OUTPUT= folders, as a machine lists and sends it."""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from contract.errors import UserError
from launcher import checkpoints, collect, outputs, remote
from launcher.machines.engine import MachineError
from launcher.machines.local import LocalNode
from launcher.watch import guards
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


def attempt_on(hosts):
    return [{"nodes": [*hosts], "ranks": {host: [n] for n, host in enumerate(hosts)}}]


def search(nodes, there, run=None, say=lambda text: None, unfit=(), last=()):
    """As in a run whose last attempt was on these machines."""
    attempts = SimpleNamespace(list=attempt_on(last) if last else [])
    site = SimpleNamespace(folders=there, folder=run, attempts=attempts)
    site.machines, site.terminal = SimpleNamespace(nodes=nodes), SimpleNamespace(say=say)
    return checkpoints.Search(site, ("out",), unfit)


def names(nodes, there):
    return {host: list(held) for host, held in search(nodes, there).checkpoints.items()}


def spread(nodes, there, run, room=1 << 20, *more):
    return search(nodes, there, run, *more).copy_newest(room)


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
    said = outputs.fetch_outputs(nodes, there, ("out", "missing"), run, 1 << 20)
    assert here(run) == ["work/node1/out/deep/a.txt", "work/node2/out/a name with spaces.txt"]
    assert (run / "work/node1/out/deep/a.txt").read_text() == "one"
    assert said[0] == "node1: 1 of 1 file in work/node1"
    assert said[1].startswith("node1: 2 files not copied from ")
    assert said[1].endswith(", links: out/link.txt, out/linked")
    assert said[2:] == ["node2: 1 of 1 file in work/node2"]


def laid_out(sent, there, version="v1", outputs=()):
    """Lay out these files on each machine, as a command does that begins; return what is said."""
    said, own = [], Path(there["node1"]).parent / version / "own"
    for name, text in sent.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).unlink(missing_ok=True)  # read-only since the last call
        (own / name).write_text(text)
        (own / name).chmod(0o444)
    machines = SimpleNamespace(nodes={one.name: LocalNode(one) for one in HOSTS.values()})
    parts = [SimpleNamespace(host=h, code=str(own.parent), output=there[h]) for h in there]
    guards.lay_out(SimpleNamespace(nodes=parts), machines, outputs, said.append)
    return said


def test_without_a_name_all_that_is_new_or_changed_comes_once(nodes, there, run):
    laid_out({"train.py": "x", "notes.txt": "x"}, there)
    for name in there:
        wrote(there, name, "notes.txt", at=6)
        wrote(there, name, "__pycache__/train.pyc")
        wrote(there, name, "a/result.txt", name)
    said = outputs.fetch_outputs(nodes, there, (), run, 1 << 20)
    names = ("a/result.txt", "notes.txt")
    assert here(run) == [*(f"work/node1/{name}" for name in names), "work/node2/a/result.txt"]
    assert said[0] == "node1: 2 of 2 files in work/node1"
    assert said[-1].startswith("node2: 1 file identical")


def test_a_sent_file_never_replaces_one_of_the_run(there):
    """`same`: the run changed it, the user did not; `both`: both did; `made`: the run made it."""
    work = Path(there["node1"], "work/node1")
    sent = dict.fromkeys(("train.py", "same", "both", "gone", "kind"), "sent")
    assert laid_out(sent, there, outputs=["saved/a"]) == []
    assert (work / "saved/a").is_dir()
    assert (work / "train.py").stat().st_mode & 0o200  # although it was sent without
    for name in ("same", "both", "made"):
        (work / name).write_text("run")
    for name in ("gone", "kind"):
        (work / name).unlink()
    (work / "kind").mkdir()
    shutil.rmtree(there["node2"])
    before = {path: path.lstat().st_mtime_ns for path in work.iterdir()}
    assert laid_out(sent, there) == []  # a restart
    assert {path: path.lstat().st_mtime_ns for path in work.iterdir()} == before
    assert Path(there["node2"], "work/node2/train.py").read_text() == "sent"
    sent |= dict.fromkeys(("train.py", "both", "made", "kind"), "repaired")
    (said,) = laid_out(sent, there, "v2")  # make train RESUME=
    assert said.startswith("node1: ") and said.endswith(": both, kind, made")
    assert [(work / name).read_text() for name in ("train.py", "same", "both", "made")] == [
        *("repaired", "run", "run", "run")
    ]
    assert not (work / "gone").exists() and (work / "kind").is_dir()


def test_a_machine_whose_folder_cannot_be_made_is_named(there):
    Path(there["node2"], "work/node2").rename(Path(there["node2"], "work/other"))
    Path(there["node2"], "work/node2").write_text("")
    with pytest.raises(MachineError, match=r"node2: the folder of the script .*work/node2: "):
        laid_out({"train.py": ""}, there)


def test_a_checkpoint_that_was_sent_is_not_the_run_s(nodes, there, run):
    laid_out({"out/last.pth": "last week"}, there)
    assert search(nodes, there, run).sent == ["out/last.pth"] * 2
    assert spread(nodes, there, run) is None
    wrote(there, "node1", "out/last.pth", "this run", at=9)
    assert spread(nodes, there, run) == "out/last.pth"
    assert Path(there["node2"], "work/node2/out/last.pth").read_text() == "this run"


LONG_PATH = b"out/" + b"/".join([b"d" * 255] * 15)
NAMES = [
    *(
        b"n" * 255,
        "\u5b9e\u9a8c".encode() * 42,
        b"\xff\xfe.pt",
        b"a\n\tb\n",
        b"\x1b[2J",
        "\u3000x".encode(),
    ),
    *(b" ", b"-rf", b"$(id) `id` 'a' \"b\" %41 \\", b"a/" * 1200 + b"deep"),
    LONG_PATH[4:] + b"/" + b"f" * (4095 - 1 - len(LONG_PATH)),
]


def test_every_name_that_a_file_system_accepts_comes_back_and_all_else_is_counted(
    nodes, there, run
):
    work = Path(there["node1"], "work/node1")
    base = os.open(work, os.O_RDONLY)
    for name in NAMES:
        *parents, _ = (b"out/" + name).split(b"/")
        for count in range(1, len(parents) + 1):
            with contextlib.suppress(FileExistsError):
                os.mkdir(b"/".join(parents[:count]), dir_fd=base)
        os.close(os.open(b"out/" + name, os.O_CREAT | os.O_WRONLY, dir_fd=base))
    (work / "out/link").symlink_to(os.fsdecode(NAMES[0]))
    os.mkfifo(work / "out/fifo")
    said = outputs.fetch_outputs(nodes, there, ("out",), run, 1 << 20)
    find = ["find", "out", "-type", "f", "-print0"]
    came = subprocess.check_output(find, cwd=run / "work/node1").split(b"\0")
    subprocess.run(["rm", "-rf", work, run / "work"], check=True)  # too deep for Python
    assert sorted(came[:-1]) == sorted(b"out/" + name for name in NAMES)
    assert said[0] == f"node1: {len(NAMES)} of {len(NAMES)} files in work/node1"
    assert ["links: out/link" in line for line in said].count(True) == 1
    assert ["not regular files: out/fifo" in line for line in said].count(True) == 1


def test_a_file_that_makes_a_tool_run_programs_stays_on_its_machine(nodes, there, run):
    """Here `git status` would obey the config of a repository, `cd` an .envrc."""
    bad = ("r/.git/config", "bare/HEAD", ".envrc", "a/.VSCode/tasks.json")
    for name in (*bad, "head/weights.pt"):
        wrote(there, "node1", f"out/{name}")
    said = outputs.fetch_outputs(nodes, there, ("out",), run, 1 << 20)
    assert here(run) == ["work/node1/out/head/weights.pt"]
    assert said[0] == "node1: 1 of 5 files in work/node1" and said[1].startswith("node1: 4 files")
    assert all(name in said[1] for name in bad)


def test_a_machine_brings_so_many_bytes_the_newest_first(nodes, there, run):
    wrote(there, "node1", "out/old.pt", "o" * 600, at=1)
    wrote(there, "node1", "out/new.pt", "n" * 600, at=2)
    said = outputs.fetch_outputs(nodes, there, ("out",), run, 1000)
    assert here(run) == ["work/node1/out/new.pt"]
    assert said[0] == "node1: 1 of 2 files in work/node1" and "KEEP= raises: out/old.pt" in said[1]


class Lists(LocalNode):
    """A machine that answers a listing with these names."""

    names = ()

    def start(self, argv):
        if argv[-1] == "-":  # a program that is sent
            files = [[quote(f"out/{name}"), 1, 5] for name in self.names]
            answer = json.dumps({"files": files, "count": len(files), "others": {}})
            return super().start(["echo", remote.MARK + answer])
        return super().start(argv)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\0b", "x" * 256])
def test_a_name_that_leads_elsewhere_is_no_file(nodes, there, run, name):
    """Nor is one that is a folder's, too."""
    liar = Lists(HOSTS[1])
    liar.names = (name, "b", "b/c", "good.txt")
    wrote(there, "node1", "out/b/c")
    wrote(there, "node1", "out/good.txt")
    said = outputs.fetch_outputs({**nodes, "node1": liar}, there, ("out",), run, 1000)
    assert "node1: 2 files not copied" in said[1] and "names that lead out" in said[1]
    assert here(run) == ["work/node1/out/b/c", "work/node1/out/good.txt"]


@pytest.mark.parametrize(("before", "after"), [("a", "a/b.txt"), ("a/b.txt", "a")])
def test_what_was_a_file_and_is_a_folder_is_that_file_s_trouble(nodes, there, run, before, after):
    """Of a run that goes on; not a disk that is full, by which nothing more would be brought."""
    wrote(there, "node1", f"out/{before}")
    outputs.fetch_outputs(nodes, there, ("out",), run, 1 << 20)
    shutil.rmtree(Path(there["node1"], "work/node1/out"))
    wrote(there, "node1", f"out/{after}", at=2)
    wrote(there, "node1", "out/c.txt", at=1)
    said = outputs.fetch_outputs(nodes, there, ("out",), run, 1 << 20)
    assert here(run) == [f"work/node1/out/{before}", "work/node1/out/c.txt"]
    assert any("something else has its name" in s and s.endswith(f": out/{after}") for s in said)


def planted(*_):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("reader", ["is_below", "receive_file"])
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
    said = outputs.fetch_outputs(nodes, {"node1": there["node1"]}, ("out",), run, 1 << 20)
    assert any("not copied" in line and "ZeroDivisionError: planted" in line for line in said)
    outputs.fetch_outputs(nodes, there, ("out",), run, 1 << 20)
    assert here(run) == ["work/node1/out/a.pt", "work/node2/out/a.pt"]
    calls.clear()
    assert search(nodes, there).checkpoints["node2"]


def test_more_files_than_a_run_takes_are_counted(nodes, there, run, monkeypatch):
    monkeypatch.setattr(outputs, "MOST_FILES", 2)
    for number in range(4):
        wrote(there, "node1", f"out/{number}", at=number)
    told = outputs.fetch_outputs(nodes, there, ("out",), run, 1000)
    assert here(run) == ["work/node1/out/2", "work/node1/out/3"]
    assert told[0] == "node1: 2 of 4 files in work/node1"
    assert "2 files not copied" in told[1] and told[1].endswith("the 2 newest files of a machine")


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
    assert search(nodes, there, run).find_on_all() is None
    for number in (1, 2):
        wrote(there, "node1", f"out/{number}.pt", "one", at=number)
    with pytest.raises(UserError, match="node2 has none"):
        search(nodes, there, run).find_on_all()
    wrote(there, "node2", "out/3.pt", "two", at=3)
    with pytest.raises(UserError, match="no intact checkpoint is on all machines"):
        search(nodes, there, run).find_on_all()
    wrote(there, "node2", "out/2.pt", archive()[:-30], at=2)
    wrote(there, "node2", "out/1.pt", "two", at=1)
    assert search(nodes, there, run).find_on_all() == "out/1.pt"
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
        ("out/7.safetensors", safe(), safe()[:-1]),
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


def test_a_folder_that_is_a_checkpoint_is_taken_whole(nodes, there, run):
    """As Accelerate's save_state writes it: each rank its random state, on its own machine."""
    newer = "checkpoint_2"
    accelerates(there, "node1", "checkpoint_1", STATE, at=1)
    accelerates(there, "node1", newer, STATE, at=2)
    accelerates(there, "node2", newer, ("random_states_1.pkl",), at=2)
    wrote(there, "node1", "out/log.txt", at=3)
    assert spread(nodes, there, run) == f"out/{newer}"
    other = Path(there["node2"], "work/node2/out", newer)
    assert sorted(file.name for file in other.iterdir()) == sorted((*STATE, "random_states_1.pkl"))
    accelerates(there, "node1", "checkpoint_3", STATE[:2], at=3)  # killed before the last file
    assert spread(nodes, there, run) == f"out/{newer}"


@pytest.mark.parametrize(
    ("checkpoint", "files"),  # where * stands for the checkpoint
    [
        ("r18_lr0.1_epoch90/ckpt_03.pth", "* r18_lr0.1_epoch90/log.txt"),
        ("trial_epoch_300/weights/last.pt", "*"),
        ("version_0/checkpoints/epoch=1-step=9.ckpt", "*"),
        ("b_epoch3/checkpoint-5", "*/model.safetensors b_epoch3/trainer_state.json"),
        ("checkpoint-5", "*/optimizer.pt trainer_state.json"),
        ("epoch_005", "*/net_epoch_5.pth */opt_epoch_5.pth"),
        ("global_step10", "*/mp_rank_00_model_states.pt"),
        ("epoch=1-step=9.ckpt", "*/checkpoint/mp_rank_00_model_states.pt"),
        ("checkpoint-5", "*/global_step5/mp_rank_00_model_states.pt */rng_state_0.pth"),
        ("checkpoint-5", "*/unet/diffusion_pytorch_model.safetensors"),
        ("checkpoint_1", "*/random_states_0.pkl */pytorch_model_fsdp_0/__0_0.distcp"),
        ("hf", "*/model-00001-of-00002.safetensors */config.json"),
        ("now", "*/.metadata */__0_0.distcp"),
        (None, "exp/epoch_3/notes.txt"),
    ],
)
def test_a_folder_is_a_checkpoint_unless_it_holds_some(checkpoint, files):
    names = [f"out/{name}" for name in files.replace("*", str(checkpoint)).split()]
    groups = checkpoints.group_files(names, ("out",))
    assert {*groups.values()} == ({f"out/{checkpoint}"} if checkpoint else set())


def of_two(there, step, *, rank1=True, rank0=("__0_0.distcp", ".metadata")):
    """As torch.distributed.checkpoint saves: a part for each rank, what they are on rank 0."""
    for name in rank0:
        wrote(
            there, "node1", f"out/step-{step}/{name}", f"{step} __0_0.distcp __1_0.distcp", at=step
        )
    if rank1:
        wrote(there, "node2", f"out/step-{step}/__1_0.distcp", f"{step}", at=step)


def test_a_checkpoint_with_parts_on_several_machines_is_assembled_on_all(nodes, there, run):
    of_two(there, 1)
    of_two(there, 2)
    of_two(there, 3, rank1=False)
    of_two(there, 4, rank0=("__0_0.distcp",))
    found = search(nodes, there, run, last=there)
    with pytest.raises(UserError, match="no intact checkpoint is on all machines"):
        found.find_on_all()
    assert found.copy_newest(1 << 20) == "out/step-2"
    assert [line.split(" ", 1)[0] for line in found.rejected] == ["out/step-4", "out/step-3"]
    assert "out/step-3/__1_0.distcp is missing (node1 has " in found.rejected[1]
    parts = {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for name in there:
        folder = Path(there[name], "work", name, "out/step-2")
        assert {path.name for path in folder.iterdir()} == parts
        assert (folder / "__1_0.distcp").read_text() == "2"


def test_a_checkpoint_that_lacks_what_a_killed_rank_writes_is_not_complete(nodes, there, run):
    """As the folder before it shows, or the names of its shards."""
    for step, node2 in ((1, ["random_1.pt"]), (2, [])):
        accelerates(there, "node1", f"step_{step}", ("model.bin", "random_0.pt"), at=step)
        accelerates(there, "node2", f"step_{step}", node2, at=step)
    accelerates(there, "node1", "step_3", ("model-00001-of-00002.bin", "random_0.pt"), at=3)
    found = search(nodes, there, run, last=there)
    assert found.copy_newest(1 << 20) == "out/step_1"
    assert "1 of 2 files such as out/step_3/model-#.bin" in found.rejected[0]
    assert "1 of 2 files such as random_#.pt" in found.rejected[1]


def test_a_run_on_fewer_machines_goes_on_from_what_it_saved_last(nodes, there, run):
    fold = "out/fold-1-of-5"
    for rank in range(3):
        wrote(there, "node1", f"{fold}/step_1/random_{rank}.pt", at=1)
    wrote(there, "node1", f"{fold}/step_2/random_0.pt", at=2)
    assert search(nodes, there, run, last=["node1"]).copy_newest(1 << 20) == f"{fold}/step_2"


def test_the_newest_is_found_by_the_times_of_the_machine_that_saves(nodes, there, run):
    """node1 has only the copy that it was given before; node2 saves, twice within a second. What a
    machine holds that had left is not newer than what the others saved without it."""
    for number in (1, 2, 3):
        wrote(there, "node2", f"out/{number}.pt", at=7 + number / 4)
    wrote(there, "node1", "out/1.pt", at=99)
    assert search(nodes, there, run, last=there).newest_first() == [
        f"out/{n}.pt" for n in (3, 2, 1)
    ]
    assert search(nodes, there, run, last=["node1"]).newest_first()[0] == "out/1.pt"


def test_a_torch_file_with_another_ending_is_found_by_its_contents(nodes, there, run):
    wrote(there, "node1", "out/ckpt_2.png", "a picture", at=3)
    wrote(there, "node1", "out/ckpt_1.th", archive(), at=1)
    assert spread(nodes, there, run) == "out/ckpt_1.th"


def hand_over(nodes, there, run, *, last=("node1", "node2"), is_told=False):
    said = []
    site = SimpleNamespace(folders=there, folder=run, terminal=SimpleNamespace(say=said.append))
    site.attempts = SimpleNamespace(
        list=attempt_on(last), find_unusable_checkpoints=lambda folder: ()
    )
    site.machines = SimpleNamespace(nodes=nodes)
    return checkpoints.hand_over_newest(site, ("out",), is_told, from_self=False), said


def test_a_script_that_looks_for_its_checkpoint_finds_the_same_on_each_machine(nodes, there, run):
    """With the file that names the newest; or it is refused."""
    wrote(there, "node1", "out/e-3.pth", "3", at=3)
    wrote(there, "node1", "out/last_checkpoint", "e-3.pth", at=3)
    assert hand_over(nodes, there, run)[0] == "out/e-3.pth"
    other = Path(there["node2"], "work/node2/out")
    assert [(other / name).read_text() for name in ("e-3.pth", "last_checkpoint")] == [
        "3",
        "e-3.pth",
    ]
    of_two(there, 4, rank1=False)
    with pytest.raises(
        UserError, match=r"step-4 is not complete: .* searches for its checkpoint itself"
    ):
        hand_over(nodes, there, run)
    assert hand_over(nodes, there, run, is_told=True)[0] == "out/e-3.pth"


def test_what_leads_to_the_newest_checkpoint_leads_there_on_each_machine(
    tmp_path, nodes, there, run
):
    """A link beside it, and a file with an absolute path, though the path has a link in it."""
    (tmp_path / "linked").symlink_to(tmp_path)
    folders = [Path(str(there[n]).replace(f"{tmp_path}/", f"{tmp_path}/linked/")) for n in there]
    mine, other = (folder / f"work/{folder.name}/out" for folder in folders)
    wrote(there, "node1", "out/e-2.ckpt", "2", at=2)
    wrote(there, "node1", "out/e-3.ckpt", "3", at=3)
    wrote(there, "node1", "out/last_checkpoint", f"{mine}/e-3.ckpt", at=3)
    for name, target in {"last": "e-3.ckpt", "far": f"{mine}/e-3.ckpt", "old": "e-2.ckpt"}.items():
        (mine / f"{name}.ckpt").symlink_to(target)
    (mine / "out.ckpt").symlink_to("/etc/passwd")
    (other / "last.ckpt").symlink_to("e-1.ckpt")
    assert hand_over(nodes, there, run)[0] == "out/e-3.ckpt"
    assert [(other / f"{name}.ckpt").read_text() for name in ("last", "far")] == ["3", "3"]
    theirs = Path(there["node2"], "work/node2/out")
    assert (other / "last_checkpoint").read_text() == f"{theirs}/e-3.ckpt"
    assert not {"old.ckpt", "out.ckpt"} & {path.name for path in other.iterdir()}


def test_a_run_begins_anew_only_if_no_machine_that_is_absent_has_a_part(nodes, there, run):
    laid_out({"out/last.pth": "last week"}, there)
    wrote(there, "node1", "out/table.csv")
    name, said = hand_over(nodes, there, run, is_told=True)
    assert name is None and "out/last.pth" in said[-1] and "out/table.csv" in said[-1]
    of_two(there, 2)
    alone = {"node1": there["node1"]}
    with pytest.raises(UserError, match="without the files of node2: resume"):
        hand_over(nodes, alone, run, is_told=True)
    assert hand_over(nodes, alone, run, is_told=True, last=["node1"])[0] is None
    wrote(there, "node1", "out/sharded/step-5/rank_0.pt", at=5)
    assert "node2 may have more files" in hand_over(nodes, alone, run, is_told=True)[1][-1]


def test_what_a_rank_keeps_for_its_sums_is_no_checkpoint(nodes, there, run):
    torch = pytest.importorskip("torch")
    attach = pytest.importorskip("tandem.sync.attach")
    kept = attach.Attached.__new__(attach.Attached)
    topology = SimpleNamespace(nodes=[0, 1])
    sync = SimpleNamespace(topology=topology, state_dict=lambda: {"error": torch.zeros(9)})
    sync.settle, kept.usage = lambda unused: None, None
    model = SimpleNamespace(module=None)
    sync.common_state, kept._model = lambda _: {}, lambda: model
    kept.scaled_spec, kept.steps, kept.sync = "ef:3:peak", 3, sync
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

    assert collect.pass_on_newest(nodes, where, run, give)
    newest.unlink()
    newest.mkdir()
    assert collect.pass_on_newest(nodes, where, run, give)
    assert given == [
        ("node1 9", 7, "step-00000009.pt"),
        ("node2 7", 7, "step-00000007.pt"),
    ]
    assert not collect.pass_on_newest({}, where, run, give)
    monkeypatch.setattr(collect, "disk_free", lambda: collect.DISK_RESERVE + 6)
    assert not collect.pass_on_newest(nodes, where, run, give) and len(given) == 2  # no room here
