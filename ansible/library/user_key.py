#!/usr/bin/python
"""Install or remove a public key in a user's authorized_keys.

Ansible runs this file on each machine, so it has to run on Python 3.6 without other packages. It
runs as root, but reads and writes in the home as the user (module_utils/users.py).
"""

import os
import pwd
import stat

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.users import acting_as

DOCUMENTATION = r"""
---
module: user_key
short_description: Installs or removes a key in a user's authorized_keys, as that user
description:
  - >-
    The module reads and writes as the user. So a link that the user has made at C(~/.ssh) or
    C(authorized_keys) leads only to files that this user may change.
  - A line that has the key stays unchanged, with its options and comment.
options:
  user:
    description: Whose key it is.
    type: str
    required: true
  key:
    description: The public key, as in a C(.pub) file.
    type: str
    required: true
  state:
    description: Whether the key is to be there.
    choices: [present, absent]
    default: present
author: Tandem
"""

RETURN = r"""
loose:
  description: >-
    Of the home, C(.ssh) and the file, those in which others may write; sshd then ignores the key.
  returned: state is present
  type: list
"""

BYTES_MAX = 1 << 20
FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in place of the file must not block


def read(file):
    """Read the lines of a file as bytes; [] if there is no file. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | FLAGS)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as opened:
        entry = os.fstat(descriptor)
        if not stat.S_ISREG(entry.st_mode) or entry.st_size > BYTES_MAX:
            raise OSError("it is not a regular file of at most 1 MiB")
        return opened.read().splitlines(keepends=True)


def holds(line, key):
    """Return true if a line of authorized_keys has the key, after any options."""
    # "no-pty ssh-ed25519 AAAAC3Nz... control@lab": the second word of `key` identifies it.
    return key.split()[1].encode() in line.split() and not line.lstrip().startswith(b"#")


def install(file, key, check_mode):
    """Add the key unless the file has it. Returns true if something changed. Raises OSError."""
    lines = read(file)
    if any(holds(line, key) for line in lines):
        return False
    if not check_mode:
        os.makedirs(os.path.dirname(file), 0o700, exist_ok=True)
        # Without a new line at the end of the file, the key would become part of the last line.
        separator = "\n" if lines and not lines[-1].endswith(b"\n") else ""
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | FLAGS, 0o600)
        with open(descriptor, "ab") as opened:
            opened.write((separator + key.strip() + "\n").encode())
    return True


def remove(file, key, check_mode):
    """Remove the lines that have the key. Returns true if something changed. Raises OSError."""
    lines = read(file)
    remaining = [line for line in lines if not holds(line, key)]
    if remaining != lines and not check_mode:
        # sshd may read the file at any time, so it is replaced atomically. A link stays a link.
        target = os.path.realpath(file)
        new_file = target + ".tandem"
        descriptor = os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | FLAGS, 0o600)
        with open(descriptor, "wb") as opened:
            opened.writelines(remaining)
        os.replace(new_file, target)
    return remaining != lines


def close(home, file, check_mode):
    """Forbid group and others to write to the key's file and folder.

    Returns the paths that they may still change, for which sshd ignores the key. Raises OSError.
    """
    # The home is only reported, since its owner may share it on purpose.
    loose = []
    for path in (home, os.path.dirname(file), file):
        mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0
        if mode & 0o022 and (path == home or check_mode):
            loose.append(path)
        elif mode & 0o022:
            os.chmod(path, mode & ~0o022)
    return loose


def main():
    module = AnsibleModule(
        {
            "user": {"required": True},
            "key": {"required": True},
            "state": {"choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    name, key = module.params["user"], module.params["key"]
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        module.fail_json(msg="this machine has no user {}".format(name))
    file = os.path.join(user.pw_dir, ".ssh", "authorized_keys")
    loose = []
    try:
        with acting_as(user.pw_uid, user.pw_gid, name):
            if module.params["state"] == "absent":
                changed = remove(file, key, module.check_mode)
            else:
                changed = install(file, key, module.check_mode)
                loose = close(user.pw_dir, file, module.check_mode)
    except OSError as error:
        module.fail_json(
            msg="{0}: {1}. Tandem reads and writes this folder as {2}, as sshd does. Make {2} "
            "the owner of the files again (ls -la {3} lists them), then run the same command "
            "again".format(file, error.strerror or error, name, user.pw_dir)
        )
    module.exit_json(changed=changed, loose=loose)


if __name__ == "__main__":
    main()
