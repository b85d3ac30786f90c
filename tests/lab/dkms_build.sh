#!/bin/sh
# DKMS itself builds Debian's nvidia module for the kernel of the lab's virtual machines, on this machine, since an emulated
# compiler is many times slower. dkms_build.sh BASE ARCHIVE WORK: packages of ARCHIVE are installed into a copy of BASE (an
# overlay); what DKMS built is ARCHIVE/built.tar.gz afterwards. Run in a mount namespace of its own.
set -eu
base=$1 archive=$2 work=$3
mkdir -p "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=$base,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
mount -t proc proc "$work/root/proc"
mount --bind /dev "$work/root/dev"
mkdir "$work/root/archive"
mount --bind "$archive" "$work/root/archive"
chroot "$work/root" sh -ec '
    export DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin
    echo "deb [trusted=yes] file:/archive ./" >/etc/apt/sources.list
    apt-get -q update
    apt-get -q -y install --no-install-recommends nvidia-kernel-dkms
    module=$(dkms status | sed -n "s/,.*//p" | head -1)
    dkms status
    dkms mktarball "$module" -k "$(ls /lib/modules)" --archive=/archive/built.tar.gz'
