#!/bin/sh
# Becomes COMMAND on the control node or the stranger's: enter.sh GROUP STATE SSH-FOLDER HOME COMMAND...
# Called in a mount namespace of its own.
set -eu
group=$1 state=$2 ssh=$3 home=$4
shift 4
echo 0 >"$group/cgroup.procs"
mount --bind "$ssh" "$home/.ssh"
mount --bind "$state/hosts" /etc/hosts
# /sys shows the network cards of the namespace it was mounted in, so it is mounted anew; control groups stay.
mount --rbind /sys/fs/cgroup "$state/cgroup"
mount -t sysfs sysfs /sys
mount --no-mtab --move "$state/cgroup" /sys/fs/cgroup
exec "$@"
