"""What driver_facts reads from the output of dpkg, apt, modinfo and systemctl."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.ansible.provision_machines import load

collect = load("ansible/library/driver_facts.py")
kernels = sys.modules["ansible.module_utils.kernels"]

DPKG = """\
ii \tnvidia-smi\t535.261.03-1\tlibnvidia-ml1 (= 535.261.03-1), libc6 (>= 2.4)
hi \tlinux-image-amd64\t6.1.129-1\tlinux-image-6.1.0-31-amd64 (= 6.1.128-1)
iF \tnvidia-kernel-dkms\t535.261.03-1\tdkms
rc \tnvidia-driver\t470.1-1\t
ii \tbash\t5.2.15-2+b8\tlibc6 (>= 2.36)
"""
# As dpkg and apt-cache of Ubuntu 24.04 show them (packages.ubuntu.com, noble-updates: of
# nvidia-driver-550 and nvidia-headless-550 550.163.01 is left what leads to 580).
NOBLE = """\
ii \tnvidia-driver-550\t550.163.01-0ubuntu0.24.04.2\tnvidia-driver-580
ii \tnvidia-driver-580\t580.173.02-0ubuntu0.24.04.1\tnvidia-dkms-580 (<= 580.173.02-1), \
nvidia-dkms-580 (>= 580.173.02), nvidia-kernel-common-580 (>= 580.173.02)
ii \tnvidia-kernel-common-495\t510.73.05-0ubuntu0.21.10.1\tnvidia-kernel-common-510
"""
SHOWN = """\
Package: nvidia-headless-550
Version: 550.163.01-0ubuntu0.24.04.2
Depends: nvidia-headless-580
Description-en: Transitional package for nvidia-headless-580

Package: nvidia-headless-580
Version: 580.173.02-0ubuntu0.24.04.1
Depends: nvidia-headless-no-dkms-580, nvidia-dkms-580 (<= 580.173.02-1)
Description-en: NVIDIA headless metapackage
"""
POLICY = """\
nvidia-kernel-dkms:
  Installed: 535.261.03-1
  Candidate: 535.300.01-1
  Version table:
     535.300.01-1 500
nvidia-driver-999:
  Installed: (none)
  Candidate: (none)
  Version table:
"""


@pytest.fixture
def says(monkeypatch):
    """says(words, text): what a command whose line begins with `words` prints; others fail."""
    answers = {}

    def output(*argv, seconds=10):
        line = " ".join(argv)
        return next((text for begin, text in answers.items() if line.startswith(begin)), None)

    monkeypatch.setattr(collect, "output", output)
    return lambda words, text: answers.update({words: text.strip()})


def test_packages_that_count_are_installed_whole(says):
    says("dpkg-query", DPKG)
    assert collect.packages() == {
        "packages": {"nvidia-smi": "535.261.03-1", "linux-image-amd64": "6.1.129-1"},
        "held": ["linux-image-amd64"],
        "transitional": {},
    }


def test_a_package_that_leads_to_another_branch_is_transitional(says):
    says("dpkg-query", NOBLE)
    assert collect.packages()["transitional"] == {
        "nvidia-driver-550": "nvidia-driver-580",
        "nvidia-kernel-common-495": "nvidia-kernel-common-510",
    }
    says("apt-cache -o none show", SHOWN)
    names = ["dkms", "nvidia-headless-550", "nvidia-headless-580"]
    leads = {"nvidia-headless-550": "nvidia-headless-580"}
    assert collect.transitional("none", names) == leads


def test_offered_is_what_apt_would_install(says):
    says("apt-cache pkgnames", "bash\nnvidia-kernel-dkms\nnvidia-driver-999\n")
    says("apt-cache -o Dir::Etc::preferencesparts=", POLICY)
    assert collect.archive("/none", simulate=False) == {
        "offered": {"nvidia-kernel-dkms": "535.300.01-1"},
        "offered_transitional": {},
        "uninstallable": {},
    }


# Debian 12 with non-free and without non-free-firmware, as its apt-get 2.6.1 says it.
UNMET = """\
Reading package lists...
Some packages could not be installed. This may mean that you have
requested an impossible situation or if you are using the unstable
distribution that some required packages have not yet been created
or been moved out of Incoming.
The following information may help to resolve the situation:

The following packages have unmet dependencies:
 nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= 535.261.03) but it is not installable
E: Unable to correct problems, you have held broken packages.
"""


def test_a_driver_that_apt_cannot_install_is_told_with_apts_own_reason(says, monkeypatch):
    says("apt-cache pkgnames", "nvidia-kernel-dkms\nnvidia-smi\n")
    says("apt-cache -o Dir::Etc::preferencesparts=", POLICY)
    asked = []

    def outcome(*argv, seconds=300):
        asked.append(argv[-1])
        return argv[-1] == "check", UNMET

    monkeypatch.setattr(collect, "outcome", outcome)
    assert collect.archive("/none", simulate=True)["uninstallable"] == {
        "nvidia-kernel-dkms": "nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= 535.261.03) "
        "but it is not installable"
    }
    assert asked == ["check", "nvidia-kernel-dkms"]  # the others depend on it, or stand alone
    monkeypatch.setattr(collect, "outcome", lambda *argv: (True, "Inst nvidia-kernel-dkms"))
    assert collect.archive("/none", simulate=True)["uninstallable"] == {}


OLD, NEW = "535.261.03-1", "535.300.01-1"


def stanza(name, version, *lines):
    told = [f"Package: {name}", f"Version: {version}", "Architecture: all", *lines]
    return "\n".join([*told, "Description: stand-in", "", ""])


def driver(version, *lines):
    """The packages of a driver, one of which requires another at the same version."""
    depends = f"Depends: firmware-nvidia-gsp (= {version})"
    return stanza("firmware-nvidia-gsp", version, *lines) + stanza(
        "nvidia-kernel-dkms", version, depends, *lines
    )


HALF = stanza(
    "nvidia-kernel-dkms", OLD, f"Depends: firmware-nvidia-gsp (= {OLD})",
    "Status: install ok unpacked",
)  # fmt: skip


@pytest.mark.skipif(not shutil.which("apt-get"), reason="asks the real apt")
@pytest.mark.parametrize(
    ("status", "offered"),
    [(driver(OLD, "Status: hold ok installed"), NEW), (HALF, OLD)],
    ids=["held", "broken off"],
)
def test_what_we_hold_or_left_unfinished_is_no_reason_against_a_driver(
    tmp_path, monkeypatch, status, offered
):
    for folder in ("lists/partial", "archives/partial", "preferences.d"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "status").write_text(status)
    (tmp_path / "Packages").write_text(driver(offered, "Filename: ./none.deb", "Size: 1"))
    (tmp_path / "sources").write_text(f"deb [trusted=yes] file:{tmp_path} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::State "{tmp_path}"; Dir::State::status "{tmp_path}/status"; Dir::Cache "{tmp_path}";'
        f'Dir::Etc::sourcelist "{tmp_path}/sources"; Dir::Etc::sourceparts "/dev/null";'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    subprocess.run(["apt-get", "-q", "update"], check=True, capture_output=True)
    monkeypatch.setattr(collect, "PREFERENCES", f"{tmp_path}/preferences.d/*")
    found = collect.archive("/none", simulate=True)
    assert found["offered"]["nvidia-kernel-dkms"] == offered
    assert found["uninstallable"] == {}


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("6.8.0-60-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-12 (Ubuntu 12.3.0-1ubuntu1~22.04) "
         "12.3.0, GNU ld", "12"),
        ("6.1.0-31-amd64 (debian-kernel@lists.debian.org) (gcc-12 (Debian 12.2.0-14) 12.2.0",
         "12"),
        ("4.15.0-213-generic (buildd@lcy02) (gcc version 7.5.0 (Ubuntu 7.5.0-3ubuntu1))", "7"),
        ("6.18.44 (builder@host) (clang version 19.1.0)", None),
    ],
)  # fmt: skip
def test_which_gcc_built_the_kernel(monkeypatch, line, major):
    monkeypatch.setattr(collect, "read", lambda path: f"Linux version {line}")
    assert collect.kernel_compiler() == major


def test_a_newer_kernel_waits_for_its_reboot(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "BOOT", str(tmp_path))
    assert kernels.waiting_kernel("6.1.0-31-amd64") is None
    for release in ("6.1.0-9-amd64", "6.1.0-31-amd64", "6.1.0-50-amd64.old"):
        (tmp_path / f"vmlinuz-{release}").touch()
    assert kernels.waiting_kernel("6.1.0-31-amd64") is None
    (tmp_path / "vmlinuz-6.1.0-50-amd64").touch()
    assert kernels.waiting_kernel("6.1.0-31-amd64") == "6.1.0-50-amd64"


def test_what_is_offered_is_read_with_the_users_pins_and_without_ours(monkeypatch, tmp_path):
    for name in ("tandem-driver", "users"):
        (tmp_path / name).touch()
    read = []

    def output(*argv, seconds):
        if "policy" in argv:
            read.extend(path.name for path in Path(argv[2].partition("=")[2]).iterdir())
        return "nvidia-smi"

    monkeypatch.setattr(collect, "PREFERENCES", f"{tmp_path}/*")
    monkeypatch.setattr(collect, "output", output)
    collect.archive(str(tmp_path / "tandem-driver"), simulate=False)
    assert read == ["users"]


@pytest.mark.parametrize(
    ("first_line", "version"),
    [("580.126.20", "580.126.20"), ("1.0-10033 (440.33.01)", "440.33.01"), ("", "0")],
)
def test_the_installers_own_log_has_its_version(monkeypatch, first_line, version):
    monkeypatch.setattr(collect, "read", lambda path: f"{first_line}\nNVIDIA Accelerated ...")
    assert collect.runfile() == version
    monkeypatch.setattr(collect, "read", lambda path: None)
    assert collect.runfile() is None


def test_debians_module_has_another_name(says):
    assert collect.module("6.1.0-31-amd64") is None
    says("modinfo -k 6.1.0-31-amd64 -F version nvidia-current", "535.261.03\n")
    assert collect.module("6.1.0-31-amd64") == "535.261.03"


def test_the_display_manager_by_its_own_name(says):
    shown = "Id={}\nLoadState={}\nActiveState={}\n"
    says("systemctl show", shown.format("display-manager.service", "not-found", "inactive"))
    assert collect.display_manager() == {"display_manager": None, "display_manager_active": False}
    says("systemctl show", shown.format("gdm.service", "loaded", "active"))
    assert collect.display_manager() == {
        "display_manager": "gdm.service",
        "display_manager_active": True,
    }
    says("systemctl show", shown.format("gdm.service", "loaded", "inactive"))
    assert collect.display_manager()["display_manager_active"] is False


def test_who_draws_and_who_computes(monkeypatch, tmp_path):
    programs = {"10": "Xorg", "11": "python3", "12": "nvidia-persiste", "13": "bash"}
    for pid, command in programs.items():
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "comm").write_text(f"{command}\n")
        device = "/dev/null" if command == "bash" else "/dev/nvidia0"
        (tmp_path / pid / "fd/3").symlink_to(device)
    monkeypatch.setattr(collect, "PROCESSES", f"{tmp_path}/[0-9]*")
    assert collect.processes() == {
        "displays": [{"pid": 10, "command": "Xorg"}],
        "gpu_processes": [{"pid": 11, "command": "python3"}],
    }


def test_free_is_what_is_left_for_others_than_root(monkeypatch):
    state = SimpleNamespace(f_bavail=2, f_bfree=3, f_blocks=5, f_frsize=4096)
    monkeypatch.setattr(collect.os, "statvfs", lambda folder: state)
    assert collect.free("/usr") == 2 * 4096
