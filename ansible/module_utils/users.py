"""Keep modules that root runs out of folders that others may change. Python >= 3.6.

A user who may change a folder decides, by a link, where a path through it leads. Therefore root
follows a path only while root alone decides this. From there on the module acts as the user.
"""

import os
import pwd
from contextlib import contextmanager

LINKS_MAX = 40  # as in Linux's own path walk


@contextmanager
def acting_as(uid, gid, name=None):
    """Run a block with this user's permissions. Does nothing if this process is not root's."""
    if os.geteuid() or not uid:
        yield
        return
    # The user last: after it, this process may not change its groups.
    groups = os.getgroups()
    if name is None:
        os.setgroups([gid])
    else:
        os.initgroups(name, gid)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def is_roots_alone(folder):
    """Return true if only root may change a folder's files. An ACL shows in the group's bits."""
    entry = os.stat(folder)
    return not entry.st_uid and not entry.st_mode & 0o022


def as_far_as_root(path):
    """Split an absolute path into (folder, rest). The folder has no link in its path, and only root
    may change the folders above it. Others may change the rest, or it does not exist."""
    folder, names, links = "/", path.split("/")[::-1], 0
    while names and is_roots_alone(folder):
        name = names.pop()
        child = os.path.normpath(os.path.join(folder, name))
        if os.path.islink(child):
            links += 1
            if links > LINKS_MAX:
                raise OSError("too many levels of symbolic links: " + path)
            # The names of the link's target come next.
            target = os.readlink(child)
            names += target.split("/")[::-1]
            folder = "/" if target.startswith("/") else folder
        elif os.path.exists(child):
            folder = child
        else:
            names.append(name)
            break
    return folder, "/".join(names[::-1])


def name_of(uid):
    """Look up the user's name; None if this machine has none for the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
