#!/bin/sh
# Becomes COMMAND on the control machine or on the stranger: enter.sh GROUP STATE SSH-FOLDER HOME COMMAND...
# Runs in a mount namespace of its own.
set -eu
group=$1 state=$2 ssh=$3 home=$4
shift 4
echo 0 >"$group/cgroup.procs"
mount --bind "$ssh" "$home/.ssh"
mount --bind "$state/hosts" /etc/hosts
# /sys shows the network cards of the namespace in which it was mounted; control groups must stay.
mount --rbind /sys/fs/cgroup "$state/cgroup"
mount -t sysfs sysfs /sys
mount --no-mtab --move "$state/cgroup" /sys/fs/cgroup
exec "$@"
