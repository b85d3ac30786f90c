"""Keep modules that root runs out of folders that other users may change. Python >= 3.6.

A user who may change a folder can put a link there, and so decides where a path through the folder
leads. Therefore root follows a path only as far as root alone may change its folders. For the rest
of the path the modules act as the user.
"""

import os
import pwd
from contextlib import contextmanager

LINKS_MAX = 40  # Linux follows as many links in a path


@contextmanager
def acting_as(uid, gid, name=None):
    """Run a block with this user's permissions. Does nothing if this process is not root's."""
    if os.geteuid() or not uid:
        yield
        return
    # The user is set last, because a user other than root may not change the groups.
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
    """Return true if only root may change a folder's files."""
    # 0o022: group and others may write. The group's bits also show if an ACL lets somebody write.
    entry = os.stat(folder)
    return not entry.st_uid and not entry.st_mode & 0o022


def split_at_root(path):
    """Split an absolute path into (folder, rest) at the point that ends root's control.

    The folder's own path has no link, and only root may change the folders above it. The rest does
    not exist, or other users may change it. Raises OSError for too many links.
    """
    # `names` are the remaining names in reverse order, so that pop() takes the next one.
    folder, names, links = "/", list(reversed(path.split("/"))), 0
    while names and is_roots_alone(folder):
        name = names.pop()
        child = os.path.normpath(os.path.join(folder, name))
        if os.path.islink(child):
            links += 1
            if links > LINKS_MAX:
                raise OSError("too many levels of symbolic links: " + path)
            # The names of the link's target come next.
            target = os.readlink(child)
            names += reversed(target.split("/"))
            folder = "/" if target.startswith("/") else folder
        elif os.path.exists(child):
            folder = child
        else:
            names.append(name)
            break
    return folder, "/".join(reversed(names))


def name_of(uid):
    """Look up a user's name; None if this machine has no user with the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
