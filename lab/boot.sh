#!/bin/sh
# Runs one node from power-on to power-off: boot.sh GROUP NETNS DISK BASE CONTAINER-COMMAND...
# Called in a mount namespace of its own, so that every mount below ends with the node, however it ends.
set -eu
group=$1 netns=$2 disk=$3 base=$4
shift 4

# systemd-nspawn needs version 2 of control groups alone, and hosts mount both.
umount --recursive /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo 0 >"/sys/fs/cgroup/$group/cgroup.procs"

# A /run of its own, since systemd-nspawn leaves lock files there when it is killed.
run=$disk/root
mount -t tmpfs tmpfs "$run"
mkdir "$run/netns"
touch "$run/netns/$netns"
mount --bind "/run/netns/$netns" "$run/netns/$netns"
mount --no-mtab --move "$run" /run

mount -t overlay -o "lowerdir=$base,upperdir=$disk/upper,workdir=$disk/work" overlay "$disk/root"

# A machine may set the parameters of its own network, /proc/sys/net, and nothing else in the kernel.
export SYSTEMD_NSPAWN_API_VFS_WRITABLE=network

# With exit code 133 systemd-nspawn says that the machine wants to be rebooted.
code=133
while [ "$code" = 133 ]; do
    # What a power cycle clears: addresses, routes, packet filters, empty control groups.
    nsenter --net="/run/netns/$netns" sh -c '
        nft flush ruleset
        ip address flush dev eth0
        ip link set eth0 down'
    find "/sys/fs/cgroup/$group" -mindepth 1 -depth -type d -exec rmdir {} +
    code=0
    "$@" || code=$?
done
exit "$code"
