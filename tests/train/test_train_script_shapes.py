"""Scripts in the shapes that people have them: what is sent, what comes back, how failures are
told. Each is a few lines, on two nodes of this machine."""

import json
import subprocess

import pytest

from tests.train.script_runs import TRAIN, begin, ended, train

pytest.importorskip("fabric", reason="a run needs the control node's environment")

# Ranks that meet once, as all that trains together does.
MEET = """
import atexit, torch.distributed as dist
dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)
dist.barrier()
rank = dist.get_rank()
"""


def write(folder, files):
    """{name: text}; returns the path of train.py."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "train.py"


def git(folder, *words):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def cause_of(run):
    return json.loads((run / "attempts.json").read_text())["attempts"][-1]["first_cause"]


def came(run):
    work = run / "work"
    return sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file())


def test_a_folder_as_people_have_it_trains_and_what_is_new_comes_back(tmp_path):
    """Packages by a helper's path, by a nested clone and by a link; a tracked marker and an empty
    folder; results beside the code."""
    script = (
        "import paths, config, cloned.net, linked.net, absent_everywhere_but_here\n" + MEET +
        "import pathlib\n"
        "assert pathlib.Path('.project-root').exists()\n"
        "pathlib.Path('saved/model.txt').write_text('same')\n"
        "pathlib.Path(f'result-{rank}.txt').write_text(str(rank))\n"
        "pathlib.Path('notes.txt').write_text('changed')\n"
    )  # fmt: skip
    helper = (
        "import sys, os\n"
        "sys.path.insert(0, os.path.join(os.path.dirname(__file__), '../lib'))\n"
        "sys.modules['absent_everywhere_but_here'] = sys\n"
    )
    files = {"tools/train.py": script, "tools/paths.py": helper, "saved/.gitkeep": ""}
    files |= dict.fromkeys(("lib/config.py", "cloned/net.py", ".project-root", "notes.txt"), "")
    write(tmp_path, {**files, ".gitignore": "keys.txt\n", "keys.txt": "secret"})
    (tmp_path / "linked").symlink_to("cloned")
    for folder in (tmp_path / "cloned", tmp_path):
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "begun")
    said, code, run = train(tmp_path / "tools/train.py")
    assert code == 0, said
    assert "imports absent_everywhere_but_here" in said and "config" not in said.split("attempt")[0]
    assert came(run) == [
        *("node1/notes.txt", "node1/result-0.txt", "node1/saved/model.txt"),
        "node2/result-1.txt",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("open('./data/train.csv')", "data/train.csv"),
        ("import hidden.module", "hidden"),
        ("open(__file__.replace('train.py', 'data/train.csv'))", "data/train.csv"),
    ],
)
def test_a_failure_for_want_of_a_file_that_was_not_sent_says_so(tmp_path, body, names):
    files = {"train.py": MEET + body, "data/train.csv": "1", "hidden/module.py": ""}
    write(tmp_path, {**files, ".gitignore": "data\nhidden\n"})
    git(tmp_path, "init", "-q")
    said, code, run = train(tmp_path / "train.py")
    assert code == 1, said
    assert cause_of(run)["remedy"].startswith(f"{names} is here and was not sent (ignored by git)")


OWN_PORT = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, world):
    {}
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2, total
    dist.destroy_process_group()
if __name__ == "__main__":
    {}
"""
BY_NAME = (
    'os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29777")\n    dist.init_process_group'
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "joins", "starts"),
    [
        (2, BY_NAME + "('gloo')", "work(int(os.environ['RANK']), 2)"),
        (
            2,
            "dist.init_process_group('gloo', 'tcp://127.0.0.1:29778', rank=rank, world_size=world)",
            "work(int(os.environ['RANK']), 2)",
        ),
        (1, BY_NAME + "('gloo', rank=rank, world_size=world)", "mp.spawn(work, (2,), 2)"),
    ],
)
def test_a_script_with_a_port_of_its_own_trains(tmp_path, nodes, joins, starts):
    own = OWN_PORT.format(joins, starts)
    said, code, _ = train(write(tmp_path, {"train.py": own}), f"--nodes={nodes}")
    assert code == 0, said


@pytest.mark.long
def test_a_script_with_a_port_of_its_own_goes_on_after_a_rank_was_killed(tmp_path):
    own = """
import os, sys, torch, torch.distributed as dist
os.environ["MASTER_PORT"] = "29779"
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({"epoch": 1}, "out/1.pt")
dist.barrier()
if dist.get_rank() == 1 and not sys.argv[1:]:
    os.kill(os.getpid(), 9)
dist.barrier()
assert torch.load(sys.argv[2])["epoch"] == 1
dist.destroy_process_group()
"""
    goes_on = ("--output=out", "--resume-args=--resume {last}", "--max-restarts=1")
    said, code, run = train(write(tmp_path, {"train.py": own}), *goes_on)
    assert code == 0, said
    failed, _ = json.loads((run / "attempts.json").read_text())["attempts"]
    assert (failed["first_cause"]["host"], failed["first_cause"]["signal"]) == ("node2", "SIGKILL")


KEEPS = """
import os, sys, torch
state = {"whose": "the run's"}
if sys.argv[1:]:
    assert torch.load(sys.argv[2]) == state and "run" in open("notes.txt").read()
    print("No module named triton; Permission denied; No space left on device")
    print("OSError: [Errno 28] No space left on device", file=sys.stderr, flush=True)
    if rank == 1:
        raise ValueError("a mistake")
    dist.barrier()
    sys.exit()
open("notes.txt", "a").write("run")
if rank == 0:
    torch.save(state, "out/last.pth")
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
"""


def test_a_run_keeps_its_files_when_it_starts_again_and_goes_on_with_a_repaired_script(tmp_path):
    """Last week's results were sent with the code."""
    path = write(tmp_path, {"train.py": MEET + KEEPS, "out/last.pth": "old", "notes.txt": "sent "})
    (tmp_path / "notes.txt").chmod(0o444)
    goes_on = ("--output=out", "--resume-args=--resume {last}", "--max-restarts=1")
    said, code, run = train(path, *goes_on)
    assert code == 1, said
    # Neither what was printed above the exception nor the attempt before explains it.
    cause = cause_of(run)
    assert cause["message"] == "node2, rank 1: ValueError: a mistake"
    assert "space" not in cause["remedy"]
    path.write_text(MEET + KEEPS.replace('raise ValueError("a mistake")', "print(state)"))
    (tmp_path / "notes.txt").chmod(0o644)
    (tmp_path / "notes.txt").write_text("changed")
    said, code, _ = ended(begin([*TRAIN, f"--resume={run.name}"]))
    assert code == 0, said
    assert "keeps this run's versions of files" in said and ": notes.txt" in said


@pytest.mark.long
def test_a_rank_with_fewer_batches_is_the_first_cause(tmp_path):
    own = (
        MEET + "import torch\n"
        "for _ in range(5 + 5 * rank): dist.all_reduce(torch.ones(1))\n"
        "if rank == 1: dist.all_reduce(torch.ones(1))\n"
    )
    said, code, run = train(write(tmp_path, {"train.py": own}))
    cause = cause_of(run)
    assert (code, cause["host"], cause["rank"]) == (1, "node1", 0), said
    assert "finished" in cause["message"]


@pytest.mark.long
def test_seventy_mebibytes_are_sent(tmp_path):
    own = MEET + "assert len(open('a.bin', 'rb').read()) == 70 << 20"
    path = write(tmp_path, {"train.py": own})
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(70 << 20)
    said, code, _ = train(path)
    assert code == 0, said
    assert "73.4 MB) goes to" in said


@pytest.mark.long
def test_loaders_that_are_spawned_without_a_guard_are_explained(tmp_path):
    own = (
        "import torch.utils.data as data\n"
        "for _ in data.DataLoader([1, 2], num_workers=1, multiprocessing_context='spawn'): pass\n"
    )
    said, code, run = train(write(tmp_path, {"train.py": own}))
    assert code == 1, said
    assert "__main__" in cause_of(run)["remedy"]


@pytest.mark.long
def test_a_module_of_a_src_layout_trains_and_results_from_a_folder_it_goes_to_come_back(tmp_path):
    own = (
        "import os\nfrom ..settings import WIDTH\n" + MEET +
        "os.makedirs('outputs/12-30', exist_ok=True)\nos.chdir('outputs/12-30')\n"
        "open(f'{rank}.log', 'w').write(str(WIDTH))\n"
    )  # fmt: skip
    files = dict.fromkeys(("setup.py", "src/own/__init__.py", "src/own/cli/__init__.py"), "")
    files |= {"src/own/settings.py": "WIDTH = 4\n", "src/own/cli/train.py": own}
    write(tmp_path, files)
    said, code, run = train("-m own.cli.train", f"--folder={tmp_path}/src")
    assert code == 0, said
    assert came(run) == ["node1/outputs/12-30/0.log", "node2/outputs/12-30/1.log"]
