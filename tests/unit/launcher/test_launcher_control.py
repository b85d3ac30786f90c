"""What is told of runs, whatever became of their files."""

import json
import os

import pytest

from launcher import attempts, control, folders
from launcher.errors import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(name, plan, attempts) -> its folder."""
    monkeypatch.setattr(folders, "RUNS", tmp_path)

    def run(name, plan, told=None):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.json").write_text(plan)
        if told is not None:
            (folder / "attempts.json").write_text(told)
        return folder

    return run


@pytest.mark.parametrize("broken", ["", "{", "[]", "null", '{"nodes": 3}'])
def test_one_broken_file_does_not_hide_the_other_runs(run, capsys, broken):
    good = json.dumps({"status": "finished", "attempts": []})
    run("20260101T000000Z-resnet18-2n", '{"nodes": [1, 2]}', good)
    run("20260102T000000Z-resnet18-4n", broken, broken)
    assert control.runs() == 0
    _, newest, oldest = capsys.readouterr().out.splitlines()
    assert newest.split()[1:3] == ["abandoned", "?"]
    assert oldest.split()[1:3] == ["finished", "2"]
    assert control.status("20260102T000000Z-resnet18-4n") == 0


def test_a_controller_on_another_machine_is_not_killed_here(run, monkeypatch):
    """runs/ may lie on a share: the number is then that of somebody else's process here."""
    folder = run("20260101T000000Z-resnet18-2n", "{}")
    held = folders.lock(folder)
    (folder / "controller.pid").write_text(f"{os.getpid()} pc7\n")
    monkeypatch.setattr(control.os, "kill", lambda *_: pytest.fail("killed"))
    with pytest.raises(UserError, match="is carried out on pc7: `make stop` it there"):
        control.stop(folder.name)
    held.close()


def test_a_plan_is_its_owner_s_alone(tmp_path):
    attempts.write_json(tmp_path / "plan.json", {"git_diff": "secret"}, mode=0o600)
    attempts.write_json(tmp_path / "attempts.json", {})
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.glob(".*")] == []
