"""The shell scripts under tools/, as far as they decide something."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout_without_python(tmp_path):
    """A copy of the tools, and a PATH that has everything they need except a Python."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "bin").mkdir()
    for name in ("sh", "dirname", "sha256sum", "cut", "cat"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def run_venv(checkout, environment="control"):
    argv, env = [checkout / "tools/venv.sh", environment], {"PATH": str(checkout / "bin")}
    return subprocess.run(argv, env=env, capture_output=True, text=True)


def test_without_a_python_that_is_new_enough_it_says_how_to_get_one(checkout_without_python):
    old = checkout_without_python / "bin/python3"
    for _ in range(2):
        done = run_venv(checkout_without_python)
        assert done.returncode == 1
        assert "apt install python3-venv" in done.stderr and "uv python install" in done.stderr
        assert not (checkout_without_python / ".venv").exists()
        old.write_text("#!/bin/sh\nexit 1\n")  # what `sys.exit(sys.version_info < ...)` answers
        old.chmod(0o755)
    done = run_venv(checkout_without_python, environment="core2.17")
    assert (done.returncode, "core2.17" in done.stderr) == (1, True)


def test_installing_says_how_far_it_is_and_leaves_nothing(checkout_without_python):
    """A stand-in for Python and pip: pip ends when two lines on the way were printed."""
    checkout = checkout_without_python
    for name in ("date", "du", "rm", "mkdir", "touch", "mkfifo"):
        (checkout / "bin" / name).symlink_to(shutil.which(name))
    sleep, python = checkout / "bin" / "sleep", checkout / "bin" / "python3"
    # The third sleep begins when the second line is printed.
    sleep.write_text(
        f"#!/bin/sh\necho >> {checkout}/slept\n"
        f"[ $(cat {checkout}/slept | grep -c '') -ge 3 ] && touch {checkout}/enough\n"
        f"exec {shutil.which('sleep')} 0.1\n"
    )
    pip = (
        "#!/bin/sh\necho data > $TMPDIR/torch.whl\n"
        f"until [ -e {checkout}/enough ]; do {shutil.which('sleep')} 0.1; done\n"
    )
    python.write_text(
        "#!/bin/sh\n"
        '[ "$2" = venv ] || exit 0\n'
        "mkdir -p $3/bin\n"
        f"cat > $3/bin/pip <<'END'\n{pip}END\n"
        f"{shutil.which('chmod')} +x $3/bin/pip\n"
    )
    (checkout / "bin" / "grep").symlink_to(shutil.which("grep"))
    for made in (sleep, python):
        made.chmod(0o755)
    done = run_venv(checkout)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert "installing requirements/control.txt" in first
    assert len(others) >= 2
    assert all(len(line) <= 80 and "MB downloaded" in line for line in others)
    assert not (checkout / ".venv" / ".installing").exists()


def test_a_job_in_the_background_of_a_script_can_be_interrupted():
    """Its shell starts it with SIGINT ignored, and all that it starts."""
    asks = "import tests.conftest, signal; print(signal.getsignal(signal.SIGINT))"
    argv = ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, asks]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "default_int_handler" in done.stdout, done.stdout
