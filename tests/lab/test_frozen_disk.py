"""A guard whose environment lies on a disk that stands still: a file system of its own, frozen."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.launcher.guard_client import GUARD, LAUNCH, Client, wait_until_gone

# As what a rank compiles or caches beside its environment, until the disk takes nothing more.
SCRIPT = """
import os, time
print("ready", flush=True)
while os.environ["RANK"] == "0":
    with open({file!r}, "a") as file:
        file.write("x")
    time.sleep(0.01)
time.sleep(600)
"""
MARK = "TANDEM_FROZEN=1"


@pytest.fixture
def disk(tmp_path):
    """A mounted file system; `fsfreeze` works on it, and it is thawed in any case."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    thaw = f"sleep 90; fsfreeze --unfreeze {folder}"
    watch = subprocess.Popen(["sh", "-c", thaw], start_new_session=True)
    yield folder
    subprocess.run(["fsfreeze", "--unfreeze", folder], stderr=subprocess.DEVNULL, check=False)
    assert wait_until_gone(MARK, 20) == []
    watch.kill()
    subprocess.run(["umount", folder], check=True)


def test_the_lease_ends_the_run_where_the_environments_disk_is_frozen(disk, tmp_path):
    """The guard goes on telling how its machine is, and ends what can be ended."""
    subprocess.run([sys.executable, "-m", "venv", "--copies", "--without-pip", disk], check=True)
    guard = Client(["/usr/bin/python3", "-IB", str(GUARD), "test"])
    argv = [str(disk / "bin/python"), LAUNCH, "2", SCRIPT.format(file=str(disk / "cache"))]
    name, _, value = MARK.partition("=")
    env = {name: value}
    guard.start(tmp_path / "run", argv, (0, 1), lease=3.0, record=True, env=env)
    for rank in (0, 1):
        guard.wait_for_output(b"ready", rank)
    pids = {rank: guard.wait_for("worker", rank=rank)["pid"] for rank in (0, 1)}
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)
    limit = time.monotonic() + 30
    while b'"state":"D"' not in guard.records.get("machine.1.jsonl", b""):
        assert time.monotonic() < limit
        guard.send(type="lease")
        guard.pump(0.2)
    end = guard.wait_for("exit", renew=False, seconds=40)
    assert (end["reason"], [one["pid"] for one in end["left"]]) == ("lease", [pids[0]])
    assert not Path(f"/proc/{pids[1]}").exists()
    guard.process.wait(60)
    guard.close()
