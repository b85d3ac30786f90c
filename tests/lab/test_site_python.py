"""The Python environment by conda and uv, with stand-ins for conda's installer and for torch."""

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.lab.site_plays import changes, play, said, write_play

INSTALLER = Path(__file__).with_name("standin-miniforge.sh")
ROOT = "/opt/standin"  # not /opt/tandem/envs, which all labs share
UV = "uv==0.13.8"  # a program of one file, which PyPI has in a wheel
VERSIONS = {"torch": "2.15.0", "torchvision": "0.29.2"}  # of the stack `cpu`


def write_wheel(folder, name, version):
    """An installable package with nothing in it. Returns its file."""
    wheel, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rows.append(f"{path},sha256={digest.rstrip('=')},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def write_bundle(folder):
    """A lock and its wheels, as `make bundle` leaves them. Returns (lock, wheels)."""
    wheels, lock = folder / "wheels", folder / "standin.txt"
    wheels.mkdir()
    made = {write_wheel(wheels, *each): "{}=={}".format(*each) for each in VERSIONS.items()}
    digests = {wheel: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in made}
    lock.write_text("".join(f"{made[w]} --hash=sha256:{digests[w]}\n" for w in made))
    rows = [f"# lock {hashlib.sha256(lock.read_bytes()).hexdigest()}"]
    rows += [f"{digest}  {wheel.name}" for wheel, digest in digests.items()]
    (wheels / "MANIFEST.sha256").write_text("\n".join(rows) + "\n")
    return lock, wheels


@pytest.fixture(scope="module")
def provision(start_lab, tmp_path_factory):
    """provision(variable=value, ...) runs the role on the one machine; it has the lab as `.lab`."""
    lab = start_lab("python", "--nodes", "1", "--no-bundle")
    folder = tmp_path_factory.mktemp("python")
    lock, wheels = write_bundle(folder)
    made = write_play(folder, ["preflight", "python_env"], hosts="node1", become=True)
    installer = folder / "standin-miniforge.sh"
    installer.write_text(INSTALLER.read_text())
    settings = {
        "env_manager": "conda",
        "conda_installer": str(installer),
        "conda_installer_sha256": "",
        "python_env_root": ROOT,
        "python_env_lock": str(lock),
        "python_env_bundle": str(wheels),
        "python_env_seen": str(folder / "seen"),
        "env_python": f"{ROOT}/env/bin/python",
    }

    def run(check=True, **more):
        return play(lab, made, "-e", json.dumps({**settings, **more}), check=check)

    run.lab, run.installer, run.seen = lab, installer, folder / "seen"
    return run


@pytest.mark.long
def test_condas_own_python_needs_no_channel(provision):
    first = said(provision(offline=True))
    digest = hashlib.sha256(provision.installer.read_bytes()).hexdigest()
    assert "is empty, so the file that came is trusted, and any other" in first
    assert f"page of its publisher: {digest}" in first
    environment = provision.lab.ssh(1, f"readlink {ROOT}/env").strip()
    assert environment.startswith(f"{ROOT}/envs/cpu-")
    assert provision.lab.ssh(1, f"{ROOT}/env/bin/python -c 'import torch, torchvision'") == ""
    assert "No such file" in provision.lab.ssh(1, f"ls {ROOT}/conda/standin-calls 2>&1 || true")
    again = provision(offline=True)
    assert changes(again) == {"node1": 0} and digest not in said(again)


def test_pypis_apex_is_refused_by_name(provision):
    provision(offline=True)
    apex = f"$({ROOT}/env/bin/python -c 'import torch; print(torch.__path__[0])')/../apex"
    provision.lab.ssh(1, f"sudo mkdir {apex} && sudo touch {apex}/__init__.py")
    done = provision(check=False)
    assert "another project that shares only its name with NVIDIA's" in said(done)
    provision.lab.ssh(1, f"sudo rm -r {apex}")


@pytest.mark.long
def test_another_python_comes_from_the_channel_or_is_refused_offline(provision):
    remove = f"sudo rm -rf {ROOT}/envs {ROOT}/env"
    provision.lab.ssh(1, f"{remove}; echo 3.10 | sudo tee /etc/standin-python")
    done = provision(offline=True, check=False)
    assert "the installed conda has Python 3.10, while stack cpu needs 3.11" in said(done)
    provision()
    call = provision.lab.ssh(1, f"cat {ROOT}/conda/standin-calls").split()
    assert call[:6] == [
        "create",
        "--yes",
        "--quiet",
        "--override-channels",
        "--channel",
        "conda-forge",
    ]
    assert call[-2:] == ["python=3.11", "pip"]


@pytest.mark.long
def test_another_installer_than_the_first_is_refused(provision):
    digest = hashlib.sha256(provision.installer.read_bytes()).hexdigest()
    assert provision.seen.read_text() == f"{digest}  {provision.installer}\n"
    provision.installer.write_text(INSTALLER.read_text() + "# changed\n")
    provision.lab.ssh(1, f"sudo rm -rf {ROOT}")
    done = provision(check=False)
    assert f"not {digest} as at its first use" in said(done)
    assert "No such file" in provision.lab.ssh(1, f"ls {ROOT}/conda 2>&1 || true")


def test_uv_needs_no_internet_once_it_is_there(provision, tmp_path):
    lab = provision.lab
    lab.ssh(1, f"sudo rm -rf {ROOT} /etc/standin-python")
    refused = provision(env_manager="uv", offline=True, check=False)
    assert "env_manager is uv, but root finds no program uv on that machine" in said(refused)
    fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--target", tmp_path, UV]
    subprocess.run(fetch, check=True)
    lab.control("scp", "-q", str(tmp_path / "bin/uv"), "tandem@192.168.56.111:")
    lab.ssh(1, "sudo install uv /usr/local/bin/uv")
    provision(env_manager="uv", offline=True)
    code = "import sys, torch, torchvision; print(*sys.version_info[:2])"
    assert lab.ssh(1, f"{ROOT}/env/bin/python -c '{code}'") == "3 11\n"
    assert "No such file" in lab.ssh(1, f"ls {ROOT}/conda {ROOT}/pythons 2>&1 || true")
    assert changes(provision(env_manager="uv", offline=True)) == {"node1": 0}
