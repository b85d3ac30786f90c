"""The shell scripts under tools/, as far as they decide something."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout_without_python(tmp_path):
    """A copy of the tools, and a PATH that has everything they need except a Python."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copytree(ROOT / "group_vars", tmp_path / "group_vars")
    (tmp_path / "bin").mkdir()
    for name in ("sh", "dirname", "sha256sum", "cut", "cat"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def run_venv(checkout, environment="control", **env):
    argv, env = [checkout / "tools/venv.sh", environment], {"PATH": str(checkout / "bin"), **env}
    return subprocess.run(argv, env=env, capture_output=True, text=True)


def stand_in(checkout, install):
    """A stand-in for Python, whose venv has stand-ins for uv and pip that do this."""
    for name in ("date", "du", "rm", "mkdir", "touch", "sed", "grep", "sleep"):
        (checkout / "bin" / name).symlink_to(shutil.which(name))
    python = checkout / "bin" / "python3"
    python.write_text(
        "#!/bin/sh\n"
        "case $2 in\n"
        f"launcher.plan.pip_settings)\n{install};;\n"
        "venv)\nmkdir -p $3/bin\n"
        f"cat > $3/bin/pip <<'END'\n#!/bin/sh\n{install}END\n"
        f"cp {python} $3/bin/python\n"
        f"{shutil.which('chmod')} +x $3/bin/pip;;\nesac\n"
    )
    (checkout / "bin/cp").symlink_to(shutil.which("cp"))
    python.chmod(0o755)


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
    """The stand-in for pip ends when two lines on the way were printed."""
    checkout = checkout_without_python
    stand_in(
        checkout,
        "echo data > $TMPDIR/torch.whl\n"
        f"until [ -e {checkout}/enough ]; do {shutil.which('sleep')} 0.1; done\n",
    )
    # The third sleep begins when the second line is printed.
    sleep = checkout / "bin" / "sleep"
    sleep.unlink()
    sleep.write_text(
        f"#!/bin/sh\necho >> {checkout}/slept\n"
        f"[ $(cat {checkout}/slept | grep -c '') -ge 3 ] && touch {checkout}/enough\n"
        f"exec {shutil.which('sleep')} 0.1\n"
    )
    sleep.chmod(0o755)
    done = run_venv(checkout)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert "installing requirements/control.txt" in first
    assert len(others) >= 2
    assert all(len(line) <= 80 and "MB on the disk" in line for line in others)
    assert not (checkout / ".venv" / ".installing").exists()


@pytest.fixture
def installed(checkout_without_python):
    """installed(layer, ...) -> what it said, and the lists that uv and pip have had so far, each
    with its installer and its index. uv fails where the checkout has a file `no-uv`."""
    checkout = checkout_without_python
    stand_in(
        checkout,
        f"for word; do :; done; echo ${{0##*/}} ${{word##*/}} $PIP_INDEX_URL >>{checkout}/had\n"
        f'[ "${{0##*/}}" = pip ] || [ ! -e {checkout}/no-uv ]\n',
    )

    def installed(layer, **env):
        done = run_venv(checkout, layer, **env)
        assert done.returncode == 0, done.stderr
        had = (checkout / "had").read_text().splitlines()
        return done.stdout, [line.split() for line in had]

    installed.checkout = checkout
    return installed


UV = ["pip", "uv.txt"]  # pip installs uv first


def test_torch_is_a_layer_of_its_own_which_comes_once_and_says_its_size_before(installed):
    said, had = installed("control")
    assert had == [UV, ["python", "control.txt"]] and "about 400 MB" in said
    said, had = installed("torch")
    assert had[2:] == [UV, ["python", "torch.txt"]] and "about 5600 MB, two minutes" in said
    assert installed("torch") == ("", had)


def test_pip_installs_what_uv_could_not(installed):
    (installed.checkout / "no-uv").touch()
    said, had = installed("control")
    assert had == [UV, ["python", "control.txt"], ["pip", "control.txt"]]
    assert "uv could not install requirements/control.txt" in said


@pytest.mark.parametrize("own", ["", "https://pypi.example.org/simple"])
def test_a_mirror_counts_from_the_first_command_on(installed, own):
    settings = installed.checkout / "group_vars/all.yml"
    settings.write_text(settings.read_text().replace("\nmirror: world", "\nmirror: china"))
    said, had = installed("control", PIP_INDEX_URL=own)
    index = own or "https://pypi.tuna.tsinghua.edu.cn/simple"
    assert had == [[*UV, index], ["python", "control.txt", index]]
    assert f"from {index}\n" in said
