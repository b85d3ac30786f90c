"""Connections to many machines."""

import subprocess
import sys

import pytest

from launcher.machines.inventory import CHECKOUT

MANY = """
import os, resource, sys
from launcher.machines import connection
from contract.errors import UserError
from tests.unit.launcher.launcher_values import host
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    nodes, _ = connection.open_all([host(n, connection="local") for n in range(1, 301)])
except UserError as error:
    sys.exit(str(error))
processes = [node.start(["cat"]) for node in nodes.values()]
print(len(processes))
for process in processes:
    process.close()
"""


@pytest.fixture
def many():
    """many(soft, hard) -> 300 machines with so many open files allowed."""

    def connect(soft, hard):
        argv = [sys.executable, "-c", MANY, str(soft), str(hard)]
        return subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True)

    return connect


def test_three_hundred_machines_fit_where_a_shell_allows_few_open_files(many):
    done = many(256, 4096)
    assert (done.returncode, done.stdout) == (0, "300\n"), done.stderr


def test_a_machine_that_allows_too_few_is_told(many):
    done = many(256, 512)
    assert done.returncode == 1
    assert "300 machines need about 2528 open files, and this machine allows 512" in done.stderr
