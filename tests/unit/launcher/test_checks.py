"""What is checked before a run, and waiting for machines that are busy."""

import io
import sys
import time
from dataclasses import replace

import pytest

from contract.errors import UserError
from launcher import folders, look, notify, participants
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.notify import Notify
from launcher.options import make_config
from launcher.participants import Waiter
from launcher.plan import checks
from launcher.terminal import Terminal
from tests.unit.launcher.launcher_values import facts, gpus, host

BUSY = gpus(1, processes=[{"pid": 7, "user": "ann", "command": "python x"}])


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """ready(changes of node2's facts at the first look, at the second, ...) -> call of prepare."""

    def make(*looks, until=None, starts=True, **options):
        found = iter(looks)

        def answers(hosts, _asked, **_):
            return OpenMachines(
                hosts,
                make.nodes,
                {"node1": facts(1, gpus=gpus(1)), "node2": facts(2, **next(found))},
            )

        monkeypatch.setattr(inventory, "load", lambda _path: [host(1), host(2)])
        monkeypatch.setattr(look, "open_and_probe", answers)
        monkeypatch.setattr(look, "find_unreachable_peers", lambda *_: {})
        monkeypatch.setattr(folders, "RUNS", tmp_path)
        monkeypatch.setattr(participants.time, "sleep", slept.append)
        config = replace(make_config({"model": "resnet18", **options}), until=until)
        terminal = Terminal(said)
        waiter = Waiter(terminal, Notify(config.notify, terminal), until) if starts else None
        return checks.check_machines(config, terminal, waiter)

    slept, said, make.nodes = [], io.StringIO(), {}
    make.slept, make.said = slept, said.getvalue
    return make


def test_weights_that_can_be_nowhere_are_refused_before_any_machine_is_asked(ready):
    with pytest.raises(UserError, match="there is no such file on the control node"):
        ready(args=["--weights", "~/no/best.pt"])
    with pytest.raises(UserError, match="cannot write to"):  # the machines may have this one
        ready({"writable": False}, args=["--weights", "/no/best.pt"])


def test_busy_machines_are_waited_for_and_that_is_said_once(ready):
    free = gpus(1)
    other = {**BUSY, "processes": [{"pid": 8, "user": "ben", "command": "python y"}]}
    looks = [{"gpus": BUSY}, {"gpus": BUSY}, {"gpus": other}, {"gpus": free}]
    assert ready(*looks, queue=True).machines.hosts == [host(1), host(2)]
    assert ready.slept == [participants.QUEUE_POLL_SECONDS] * 3
    waited = [line for line in ready.said().splitlines() if "waiting: " in line]
    assert [line.split("by ")[1][:3] for line in waited] == ["ann", "ben"]
    assert ready.said().count("the first that checks gets them") == 1


def test_busy_machines_are_not_waited_for_beyond_the_end(ready):
    begun = time.time()
    with pytest.raises(UserError, match=r"\(UNTIL\) and the run has not begun.*ann") as caught:
        ready({"gpus": BUSY}, {"gpus": BUSY}, queue=True, until=int(begun) - 1)
    assert ready.slept == [] and "Traceback" not in str(caught.value)


def test_who_waits_for_an_hour_is_told_of_once(ready, monkeypatch, tmp_path):
    monkeypatch.setattr(notify.time, "monotonic", lambda: 1300.0 * len(ready.slept))
    tell = f"sh -c 'echo $TANDEM_RUN $TANDEM_STATUS $TANDEM_WHY >>{tmp_path}/told'"
    assert ready(*[{"gpus": BUSY}] * 9, {"gpus": gpus(1)}, queue=True, notify=tell).machines.hosts
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert line.startswith("resnet18 on 2 machines waits ") and "ann: python x" in line


def test_what_waiting_does_not_mend_is_said_before_it(ready):
    with pytest.raises(UserError, match="cannot write to") as caught:
        ready({"gpus": BUSY, "writable": False}, queue=True)
    assert "in use" not in str(caught.value)
    assert ready.slept == []


def test_without_queue_busy_machines_are_refused_unless_forced(ready):
    with pytest.raises(UserError, match="ann: python x"):
        ready({"gpus": BUSY})
    assert ready({"gpus": BUSY}, force=True)
    assert "ann: python x" in ready.said()


def test_what_starts_nothing_needs_no_machine_for_itself(ready):
    """A dry run: that others have the machines is said, and neither refused nor waited for."""
    assert ready({"gpus": BUSY}, queue=True, starts=False).machines.hosts == [host(1), host(2)]
    assert "ann: python x" in ready.said()
    assert ready.slept == []


@pytest.mark.parametrize("limit", ["AVX2", None])
def test_limits_on_instructions_reach_every_rank_and_an_inventory_may_have_its_own(
    ready, monkeypatch, limit
):
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    checked = ready({"gpus": gpus(1)})
    checked.machines.hosts[1] = host(2, env={"ATEN_CPU_CAPABILITY": "default"})
    first, second = checks.make_plan(checked, checked.machines, run="r").nodes
    assert first.env.get("ONEDNN_MAX_CPU_ISA") == limit
    assert second.env.get("ONEDNN_MAX_CPU_ISA") == limit
    assert "ATEN_CPU_CAPABILITY" not in first.env
    assert second.env["ATEN_CPU_CAPABILITY"] == "default"


@pytest.fixture
def add(monkeypatch, tmp_path):
    """add(code of the script, prefix=..., hosts) -> how often it ran."""

    def add(*hosts, code=0, prefix=checks.CHECKOUT_ENVIRONMENT):
        script = f"echo >>{tmp_path}/ran; exit {code}"
        monkeypatch.setattr(checks, "INSTALL_TORCH", ["sh", "-c", script])
        monkeypatch.setattr(sys, "prefix", str(prefix))
        checks.add_torch(hosts, Terminal(io.StringIO()))
        ran = tmp_path / "ran"
        return len(ran.read_text().splitlines()) if ran.exists() else 0

    return add


def local(number, **changes):
    python = str(checks.CHECKOUT_ENVIRONMENT / "bin/python")
    return host(number, **{"connection": "local", "env_python": python, **changes})


def test_it_comes_where_this_machine_trains_by_it(add):
    assert add(local(1), local(2)) == 1
    assert add(host(1), local(2)) == 2


@pytest.mark.parametrize(
    ("hosts", "prefix"),
    [
        ([host(1), host(2)], checks.CHECKOUT_ENVIRONMENT),
        ([local(1, env_python="/opt/tandem/env/bin/python")], checks.CHECKOUT_ENVIRONMENT),
        ([local(1)], "/home/anna/miniforge3"),  # an environment that `make env` did not make
    ],
)
def test_it_does_not_come_where_it_would_be_of_no_use(add, hosts, prefix):
    assert add(*hosts, prefix=prefix) == 0


def test_where_it_cannot_be_installed_the_run_is_refused(add):
    with pytest.raises(UserError, match="node1 trains on this machine, which needs torch"):
        add(local(1), code=1)
