"""What apt would bring along, from what its simulation prints."""

from planning.packages import packages_planned

# apt-get 2.6.1 of Debian 12, and a foreign architecture as Ubuntu's desktops have one.
SIMULATED = """\
Reading package lists...
The following NEW packages will be installed:
  chrony libedit2
The following packages will be upgraded:
  libc6
Inst libc6 [2.36-9+deb12u9] (2.36-9+deb12u10 Debian:12.10/stable [amd64]) []
Inst libedit2 (3.1-20221030-2 Debian:12.10/stable [amd64])
Inst libnvidia-compute-580:i386 (580.126.09-0ubuntu0.22.04.1 Ubuntu:22.04 [i386])
Inst chrony (4.3-2+deb12u1 Debian:12.10/stable [amd64])
Remv systemd-timesyncd [252.36-1~deb12u1]
Conf libc6 (2.36-9+deb12u10 Debian:12.10/stable [amd64])
Conf chrony (4.3-2+deb12u1 Debian:12.10/stable [amd64])
"""


def test_new_packages_are_planned_and_upgraded_ones_are_not():
    assert packages_planned(SIMULATED) == ["chrony", "libedit2", "libnvidia-compute-580"]
    assert packages_planned("E: Unable to locate package nvidia-driver-999\n") == []
