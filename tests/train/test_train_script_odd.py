"""Scripts that write without end, take a fixed port or never meet, on two nodes of this machine."""

import os
import signal

import pytest

from contract.errors import STOPPED
from tests.train.script_runs import ended, start, train, until_it_says
from tests.trainer_ranks import free_port

pytest.importorskip("fabric", reason="a run needs the control machine's environment")

WRITES = """
import os
from torch import distributed
distributed.init_process_group("gloo")
print("the first line", flush=True)
for number in range({lines}):
    os.write(1, b"%07d %s\\n" % (number, b"x" * 1015))
print("the last line", flush=True)
"""


def test_a_log_without_end_keeps_its_beginning_and_its_end_and_the_run_goes_on(script):
    """48 MiB of each rank, of which 4 may stay: as with 10 GB and the usual 256."""
    said, code, run = train(script(WRITES.format(lines=48 << 10)), "--keep=log=4")
    assert code == 0, said[-2000:]
    for rank in (0, 1):
        files = list(run.glob(f"nodes/node{rank + 1}/rank{rank}.log*"))
        assert (3 << 20) < sum(path.stat().st_size for path in files) <= (4 << 20) + (64 << 10)
        texts = {path.name: path.read_text() for path in files}
        assert texts[f"rank{rank}.log.first"].startswith("the first line\n")
        assert texts[f"rank{rank}.log"].endswith("the last line\n")
    controllers = sum(path.stat().st_size for path in run.glob("controller.log*"))
    assert controllers <= (4 << 20) + (64 << 10)


FIXED = """
import socket, time
from torch import distributed
distributed.init_process_group("gloo")
own = socket.create_server(("127.0.0.1", {port}))
time.sleep(3600)
"""


def test_a_fixed_port_is_named_where_two_nodes_are_one_machine(script):
    said, code, _ = train(script(FIXED.format(port=free_port())))
    assert code == 1, said
    assert "OSError: [Errno 98] Address already in use" in said
    words = "let the script take MASTER_PORT from its environment, which is free, and no fixed"
    assert words in " ".join(said.split())


ALONE = "import time\nfrom torch import distributed\ntime.sleep(3600)\n"
# A minute is long for a test: so many seconds instead.
SOON = """
import sys
from launcher import cli
from launcher.watch import guards
task = guards.task
guards.task = lambda plan, node: {**task(plan, node), "meet_within": 3.0}
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_script_that_makes_no_process_group_is_told_after_a_while_and_goes_on(script):
    run = start(script(ALONE), program=SOON)
    said = [until_it_says(run, "met no other") for _ in range(2)]
    told = "met no other in 3 s: a script that never calls torch.distributed.init_process_group"
    assert sorted(line.split(": ")[1][:5] for line in said) == ["node1", "node2"]
    assert all(told in line for line in said)
    assert run.poll() is None
    os.kill(run.pid, signal.SIGTERM)
    said, code, _ = ended(run)
    assert code == STOPPED, said
