#!/usr/bin/python
"""Make or remove a folder or a link for a user.

Ansible runs this file on each machine as root, so it has to run on Python 3.6 without other
packages. Root itself acts only if no other user can change where the path leads
(module_utils/users.py).
"""

import os
import pwd

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.users import acting_as, is_roots_alone, split_at_root

DOCUMENTATION = r"""
---
module: user_path
short_description: Makes or removes a folder or a link for a user
description:
  - >-
    Root acts while only root decides where the path leads. Below a folder that others may change,
    the module acts as the user, so that a link leads only to files that this user may change.
options:
  path:
    description: An absolute path.
    type: str
    required: true
  user:
    description: The owner of the folder.
    type: str
    required: true
  state:
    description: >-
      C(directory) makes the folder, which the user may write to; C(link) makes a link; C(absent)
      removes a link or an empty folder.
    choices: [directory, link, absent]
    default: directory
  src:
    description: Where the link leads.
    type: str
author: Tandem
"""


def make_folder(path, user, check_mode):
    """Make a folder that the user may write to. Returns true if something changed."""
    folder, missing = split_at_root(path)
    new_folder = os.path.join(folder, missing)
    # split_at_root stopped in a folder of root, so `missing` does not exist there.
    if missing and is_roots_alone(folder):
        if not check_mode:
            os.makedirs(new_folder)
            os.chown(new_folder, user.pw_uid, user.pw_gid)
        return True
    # Only root may change any folder of the path, so no link can redirect this change of owner.
    if not missing and os.stat(folder).st_uid == 0 and user.pw_uid:
        if not os.path.isdir(folder):
            raise OSError("it is no folder")
        if not check_mode:
            os.chown(folder, user.pw_uid, -1)
        return True
    with acting_as(user.pw_uid, user.pw_gid, user.pw_name):
        if os.path.isdir(new_folder):
            if not os.access(new_folder, os.W_OK | os.X_OK, effective_ids=True):
                raise PermissionError("{} may not write there".format(user.pw_name))
            return False
        if not check_mode:
            os.makedirs(new_folder)
        return True


def make_link(path, source, check_mode):
    """Make a link to `source`, in place of any other link. Returns true if something changed."""
    if os.path.islink(path):
        if os.readlink(path) == source:
            return False
        if not check_mode:
            os.unlink(path)
    if not check_mode:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(source, path)
    return True


def remove(path, _, check_mode):
    """Remove a link or an empty folder, nothing else. Returns true if something changed."""
    is_link = os.path.islink(path)
    if not is_link and (not os.path.isdir(path) or os.path.ismount(path) or os.listdir(path)):
        return False
    if not check_mode:
        (os.unlink if is_link else os.rmdir)(path)
    return True


def main():
    module = AnsibleModule(
        {
            "path": {"required": True},
            "user": {"required": True},
            "state": {"choices": ["directory", "link", "absent"], "default": "directory"},
            "src": {},
        },
        supports_check_mode=True,
        required_if=[("state", "link", ["src"])],
    )
    path, name, state = (module.params[key] for key in ("path", "user", "state"))
    # sudo may have kept a user's stricter umask, and then other users could not enter the folder.
    os.umask(0o022)
    try:
        user = pwd.getpwnam(name)
        if state == "directory":
            changed = make_folder(path, user, module.check_mode)
        else:
            # Only the folder above may lead through links. The last name is the link itself.
            parent, last_name = os.path.split(path.rstrip("/"))
            folder, missing = split_at_root(parent)
            act = make_link if state == "link" else remove
            owner = (0, 0) if is_roots_alone(folder) else (user.pw_uid, user.pw_gid, name)
            with acting_as(*owner):
                target = os.path.join(folder, missing, last_name)
                changed = act(target, module.params["src"], module.check_mode)
    except KeyError:
        module.fail_json(msg="this machine has no user {}".format(name))
    except PermissionError as error:
        module.fail_json(
            msg="{0}: {1}. Others than root may change this path, so Tandem acts there as {2}, who "
            "trains, and follows no link further than {2} may. Choose another folder, or give this "
            "one to {2}: sudo install --directory --owner={2} {0}".format(
                path, error.strerror or error, name
            )
        )
    except OSError as error:
        module.fail_json(
            msg="{}: {}. Move the existing file, or choose another path, then run the same "
            "command again".format(path, error.strerror or error)
        )
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()
