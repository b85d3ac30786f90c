"""Counters: the kernel's texts in, plain values out."""

from launcher.node import counters

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    9236      92    0    0    0     0          0         0     9236      92    0    0    0     0       0          0
  eth0:4017486868 2736425    0    7    0     0          0         0  4697720   69861    0    3    0     0       0          0
wlp3s0f0u1: 12 1 0 0 0 0 0 0 34 1 0 0 0 0 0 0
"""  # noqa: E501
NET_SNMP = """\
Ip: Forwarding DefaultTTL InReceives
Ip: 1 64 2812
Tcp: RtoAlgorithm CurrEstab InSegs OutSegs RetransSegs InErrs
Tcp: 1 6 2713 2805 41 0
"""
ROUTE = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eno1\t00000000\t0138A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
"""
ROUTE6 = """\
fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eno1
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000002 00000000 00000003     eno2
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
"""  # noqa: E501
MOUNTS = """\
/dev/sda2 / ext4 rw,relatime 0 0
192.168.56.111:/srv/tandem/data /srv/tandem/my\\040data nfs4 rw,relatime,vers=4.2 0 0
//NAS/Images /mnt/images cifs rw,relatime,vers=3.1.1 0 0
"""
MOUNTSTATS = """\
device 192.168.56.111:/srv/tandem/data mounted on /srv/tandem/my\\040data with fstype nfs4 statvers=1.1
\tbytes:\t84022 0 0 0 52428800 17 12800 0
"""  # noqa: E501
CIFS_NEW = """\
CIFS Session: 1
1) \\\\nas\\Images
SMBs: 20
Bytes read: 41943040  Bytes written: 1000
Reads: 12 total 0 failed
"""
CIFS_OLD = """\
1) \\\\nas\\Images
SMBs: 9 Oplocks breaks: 0
Reads:  4 Bytes: 4096
Writes: 0 Bytes: 0
"""
DISKSTATS_1 = """\
   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       0 nvme0n1 1000 10 20480 500 100 0 800 40 0 300 540 0 0 0 0 0 0
"""
DISKSTATS_2 = """\
 259       0 nvme0n1 1200 10 61440 900 100 0 800 40 0 1300 1540 0 0 0 0 0 0
"""


def test_network_counters():
    assert counters.parse_interface(NET_DEV, NET_SNMP, "eth0") == {
        "rx_bytes": 4017486868,
        "tx_bytes": 4697720,
        "rx_dropped": 7,
        "tx_dropped": 3,
        "tcp_retransmits": 41,
    }
    assert counters.parse_interface(NET_DEV, NET_SNMP, "wlp3s0f0u1")["tx_bytes"] == 34
    assert counters.parse_interface(NET_DEV, NET_SNMP, "eth") is None


def test_the_interface_of_the_default_route():
    assert counters.find_default_interface(ROUTE, ROUTE6) == "eno1"
    assert counters.find_default_interface("", ROUTE6) == "eno2"
    assert counters.find_default_interface("Iface\n", "") == ""


def test_bytes_read_from_shares():
    assert counters.parse_shares(MOUNTS) == {
        "/srv/tandem/my data": ("192.168.56.111:/srv/tandem/data", "nfs4"),
        "/mnt/images": ("//NAS/Images", "cifs"),
    }
    assert counters.parse_nfs_reads(MOUNTSTATS) == {"/srv/tandem/my data": 52428800}
    assert counters.parse_cifs_reads(CIFS_NEW) == {"//nas/images": 41943040}
    assert counters.parse_cifs_reads(CIFS_OLD) == {"//nas/images": 4096}
    assert counters.share_name("//NAS/Images/train/2012") == "//nas/images"


def test_disk_rates_are_those_of_iostat():
    old, new = counters.parse_disks(DISKSTATS_1), counters.parse_disks(DISKSTATS_2)
    assert set(old) == {"nvme0n1"}
    rates = counters.compute_disk_rates(old["nvme0n1"], new["nvme0n1"], 2.0)
    assert rates == {
        "r/s": 100.0,
        "w/s": 0.0,
        "rkB/s": 10240.0,  # 40960 sectors of 512 bytes in 2 s
        "wkB/s": 0.0,
        "r_await": 2.0,
        "w_await": 0.0,
        "aqu-sz": 0.5,
        "util": 50.0,
    }


STAT = """\
cpu  10132 153 290696 3084719 46828 200 25195 400 175628 0
cpu0 5066 100 145348 1542359 23414 100 12597 200 87814 0
cpu1 5066 53 145348 1542360 23414 100 12598 200 87814 0
intr 1462898 23 0 0
"""
MEMINFO = """\
MemTotal:         375212 kB
MemFree:            5844 kB
MemAvailable:      11204 kB
SwapTotal:        524284 kB
SwapFree:         301040 kB
"""
VMSTAT = "nr_free_pages 1461\npswpin 51234\npswpout 98120\npgmajfault 90\n"
PRESSURE = """\
some avg10=97.54 avg60=90.92 avg300=53.04 total=249511522
full avg10=0.00 avg60=0.00 avg300=0.00 total=7
"""


def test_processors_memory_swap_and_pressure(monkeypatch):
    monkeypatch.setattr(counters, "TICK", 0.01)
    monkeypatch.setattr(counters, "PAGE", 4096)
    assert counters.parse_processors(STAT) == {
        "cores": 2,
        "cpu_busy": 3263.76,
        "cpu_iowait": 468.28,
        "cpu_steal": 4.0,
    }
    assert counters.parse_memory(MEMINFO, VMSTAT) == {
        "memory_total": 375212 * 1024,
        "memory_available": 11204 * 1024,
        "swap_total": 524284 * 1024,
        "swap_free": 301040 * 1024,
        "swapped_in": 51234 * 4096,
        "swapped_out": 98120 * 4096,
    }
    assert counters.parse_memory(MEMINFO, "")["swapped_in"] == 0  # a kernel without swap
    assert counters.parse_pressure(PRESSURE) == 249.511522
    assert counters.parse_pressure("") is None


def test_gpu_lines():
    line = counters.parse_gpu_sample("1, 97, 10842, 74, 249.81, 1905", 5.5)
    assert line == {
        "mono": 5.5,
        "index": 1,
        "utilization": 97.0,
        "memory_used": 10842 * 1024 * 1024,
        "temperature": 74.0,
        "power": 249.81,
        "clock_sm": 1905.0,
    }
    assert counters.parse_gpu_sample("0, 3, 5, 40, [N/A], [Not Supported]", 1.0)["power"] is None
    assert counters.parse_gpu_sample("Unable to determine the device handle", 1.0) is None
