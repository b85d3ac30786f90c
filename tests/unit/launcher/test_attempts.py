"""When a run starts again."""

from pathlib import Path

import pytest

from contract.errors import STOPPED, UNWRITTEN, UserError
from contract.options import Config
from launcher import cli, folders
from launcher.lifecycle import Limits, decide_restart
from launcher.machines import inventory
from launcher.watch import attempts
from launcher.watch.attempts import Outcome, choose_exit_code
from launcher.watch.failures import Failure
from tests.unit.launcher.launcher_values import build, facts, host


def ended(status="failed", **cause):
    failure = Failure(**{"host": "node3", "source": "worker", "order": 0, "rank": 2, **cause})
    return Outcome(status, failure if status == "failed" else None, 1.0, [], {})


@pytest.mark.parametrize("has_exit_codes", [True, False])
def test_a_failed_run_uses_up_what_was_allowed(has_exit_codes):
    limits, reason = decide_restart(
        ended(signal="SIGKILL", has_exit_codes=has_exit_codes), Limits(1)
    )
    assert (limits.restarts, reason) == (0, "node3, rank 2 failed: SIGKILL")
    assert decide_restart(ended(signal="SIGKILL", has_exit_codes=has_exit_codes), limits) is None


@pytest.mark.parametrize(
    "outcome", [ended("finished"), ended("stopped"), ended(exit_code=2), ended(exit_code=77)]
)
def test_no_second_attempt_when_it_could_not_help(outcome):
    assert decide_restart(outcome, Limits(5)) is None


def test_a_full_disk_is_one_machine_s_trouble_not_bad_input():
    said = "trainer: /x/node3: the checkpoint could not be written: No space left on device."
    assert decide_restart(ended(exit_code=2, last_lines=(said,)), Limits(1))[0].restarts == 0


def test_out_of_memory_halves_the_micro_batch_without_using_up_restarts():
    limits, _ = decide_restart(ended(exit_code=76), Limits(0))
    limits, _ = decide_restart(ended(exit_code=76), limits)
    assert limits.environment() == {"TANDEM_MICRO_BATCH_DIVISOR": "4"}


def test_more_machines_demanded_than_there_are(monkeypatch):
    monkeypatch.setattr(inventory, "load", lambda _: [host(1), host(2)])
    with pytest.raises(UserError, match="MIN_NODES=3"):
        inventory.hosts_of(Config(min_nodes=3))
    with pytest.raises(UserError, match="MAX_RESTARTS=-1: must be at least 0"):
        cli.parse(["train", "MAX_RESTARTS=-1"])
    assert inventory.hosts_of(Config(max_restarts=0, min_nodes=1))


def test_what_finished_but_is_not_all_here_has_a_code_of_its_own():
    finished, stopped = ended("finished"), ended("stopped")
    assert [choose_exit_code(finished), choose_exit_code(finished, is_complete=False)] == [
        0,
        UNWRITTEN,
    ]
    assert choose_exit_code(stopped, is_complete=False) == choose_exit_code(stopped) == STOPPED
    assert choose_exit_code(ended(exit_code=9), is_complete=False) == 9


def test_a_run_whose_first_files_cannot_be_written_does_not_begin(monkeypatch):
    nowhere = Path("/proc/self")  # where not even root can create files
    monkeypatch.setattr(folders, "RUNS", nowhere)
    for begin, where in (
        (folders.make_folder, (nowhere, "r")),
        (folders.lock, (nowhere / "r",)),
        (folders.point_latest, (nowhere / "r",)),
    ):
        with pytest.raises(UserError, match=r"/proc/self/.* cannot be written \(.+\): free space"):
            begin(*where)


@pytest.mark.parametrize(
    ("last", "unfit"),
    [
        ({"exit_code": 1}, {"2.pt", "3.pt"}),
        ({"exit_code": 1, "stepped": True}, set()),
        ({"signal": "SIGKILL"}, set()),
        ({"source": "gone", "rank": None}, set()),
    ],
)
def test_a_checkpoint_from_which_a_script_makes_no_step_is_not_taken_again(tmp_path, last, unfit):
    """Whoever is killed, or has made a step, has read it."""
    kept, names = attempts.Attempts(tmp_path), (None, "4.pt", "2.pt", "3.pt")
    for number, name in enumerate(names, 1):
        kept.begin(build([host(1)], [facts(1)], attempt=number), "again", 0.0, name)
        cause = dict(last) if number == len(names) else {"exit_code": 1}
        steps = tmp_path / f"nodes/node1/rank0.{number}.steps.jsonl"
        steps.parent.mkdir(parents=True, exist_ok=True)
        stepped = cause.pop("stepped", False) or number < 3
        steps.write_text('{"kind": "start"}\n' + stepped * '{"kind": "step"}\n')
        kept.end(ended(**cause))
    assert attempts.Attempts(tmp_path).find_unusable_checkpoints(tmp_path) == unfit
