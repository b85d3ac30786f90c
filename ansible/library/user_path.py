#!/usr/bin/python
"""Make or remove a folder or a link for a user. Python >= 3.6, standard library."""

import os
import pwd

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.users import acting_as, as_far_as_root, is_roots_alone

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

EXAMPLES = r"""
- name: Make the folder
  user_path:
    path: /srv/tandem/data
    user: anna
"""

RETURN = "# only whether something changed"


def make_folder(path, user, check_mode):
    """Make a folder that the user may write to. Returns whether something changed."""
    folder, missing = as_far_as_root(path)
    new_folder = os.path.join(folder, missing)
    if missing and is_roots_alone(folder):  # the rest of the path does not exist
        if not check_mode:
            os.makedirs(new_folder)
            os.chown(new_folder, user.pw_uid, user.pw_gid)
        return True
    # The whole path is root's, so it is safe to give its last folder to the user.
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


def link(path, source, check_mode):
    """Make a link, or replace another one. Returns whether something changed."""
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
    """Remove a link or an empty folder, nothing else. Returns whether something changed."""
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
    os.umask(0o022)  # sudo may have kept a user's, with which others could not enter the folder
    try:
        user = pwd.getpwnam(name)
        if state == "directory":
            changed = make_folder(path, user, module.check_mode)
        else:
            above, name_in_folder = os.path.split(path.rstrip("/"))
            folder, missing = as_far_as_root(above)
            act = link if state == "link" else remove
            owner = (0, 0) if is_roots_alone(folder) else (user.pw_uid, user.pw_gid, name)
            with acting_as(*owner):
                place = os.path.join(folder, missing, name_in_folder)
                changed = act(place, module.params["src"], module.check_mode)
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
