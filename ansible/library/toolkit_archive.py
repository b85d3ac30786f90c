#!/usr/bin/python
"""Put the files of cuDNN or NCCL inside a CUDA toolkit, or remove them.

Ansible runs this file on each machine, so it has to run on Python 3.6. Roles cudnn and nccl call
the module. A record in the toolkit lists the files, so that a later call can remove them. Read
`ensure_present` and `install` first.
"""

import errno
import hashlib
import json
import os
import posixpath
import shutil
import subprocess
import tarfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: toolkit_archive
short_description: Puts cuDNN or NCCL inside a CUDA toolkit
description:
  - Unpacks headers and libraries of NVIDIA's archives (tgz, tar.xz, txz, or a local-repository
    deb) into C(include) and C(lib64) of a toolkit. Links stay links.
  - Unpacks into a temporary folder of the toolkit, then moves the files. A list of them makes it
    possible to remove them.
  - In check mode it reports whether the archive is needed, and needs no C(src).
options:
  name:
    description: The part's name, for example cudnn.
    type: str
    required: true
  toolkit:
    description: The toolkit's folder.
    type: path
    required: true
  state:
    description: Whether the part should be in the toolkit.
    type: str
    choices: [present, absent]
    default: present
  src:
    description: The archive's path on the machine.
    type: path
  sha256:
    description: The archive's SHA-256.
    type: str
author: Tandem
"""

RETURN = r"""
files:
  description: The part's files in the toolkit, relative to the toolkit's folder.
  returned: always
  type: list
wanted:
  description: Whether the archive was needed, or would be.
  returned: state is present
  type: bool
"""

# Folders of the archives and of the deb, and the folder of the toolkit that their files go to.
TOOLKIT_FOLDERS = {
    "include": "include",
    "lib": "lib64",
    "lib64": "lib64",
    "x86_64-linux-gnu": "lib64",
}


class Refused(Exception):
    """Says why an archive cannot be used, in a clause after the archive's path."""


def hash_file(path):
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def record_path(toolkit, name):
    """Return the path of the record that lists the files of cuDNN or NCCL in a toolkit."""
    return os.path.join(toolkit, ".tandem", name + ".json")


def read_record(toolkit, name):
    """Read the record {"sha256", "files"}.

    "sha256" is None if there is no record, or if an installation was interrupted.
    """
    try:
        with open(record_path(toolkit, name)) as file:
            return json.load(file)
    except OSError:
        return {"sha256": None, "files": []}


def write_record(toolkit, name, digest, files):
    """Replace the record; digest: SHA-256 of the archive, None while an installation runs."""
    path = record_path(toolkit, name)
    # The record is replaced atomically: after a damaged record nobody could remove the files.
    with open(path + ".new", "w") as file:
        json.dump({"sha256": digest, "files": sorted(files)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def find_tars(src, work):
    """Yield the paths of the tar archives of `src`; work: a folder for temporary files."""
    if not src.endswith(".deb"):
        yield src
        return
    repository = extract_tar(src, os.path.join(work, "repository.tar"))
    # NVIDIA's local-repository package installs a folder of packages, which have the files.
    with tarfile.open(repository) as archive:
        members = archive.getmembers()
        debs = [member for member in members if member.isfile() and member.name.endswith(".deb")]
        for number, member in enumerate(debs):
            deb = os.path.join(work, "%d.deb" % number)
            with archive.extractfile(member) as source, open(deb, "wb") as target:
                shutil.copyfileobj(source, target)
            yield extract_tar(deb, os.path.join(work, "%d.tar" % number))
    if not debs:  # a plain package, such as libnccl2
        yield repository


def extract_tar(deb, tar):
    """Write a package's files as the archive `tar`; return its path. Raises Refused and OSError."""
    with open(tar, "wb") as output:
        process = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", deb], stdout=output, stderr=subprocess.PIPE, check=False
        )
    if process.returncode:
        # main() tells a full disk from a broken package by the number of the error.
        if b"No space left" in process.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise Refused("it is not a package: %s" % process.stderr.decode(errors="replace").strip())
    return tar


def toolkit_path(member):
    """Return a member's path relative to the toolkit; None if the toolkit does not need it.

    member: a tarfile.TarInfo. Raises Refused for a path that leads out of the archive.
    """
    # "cuda/include/cudnn.h", "nccl_2.19/lib/libnccl.so.2" or "./usr/lib/x86_64-linux-gnu/..."
    # The first folder of the table decides, and the rest of the path stays.
    names = posixpath.normpath(member.name).split("/")
    if member.name.startswith("/") or ".." in names:
        raise Refused("it contains a path to a place outside of it: %s" % member.name)
    if not (member.isfile() or member.issym()):
        return None
    for index, folder in enumerate(names[:-1]):
        # In a deb, lib is only the parent of the folder that has the libraries.
        if folder == "lib" and names[index + 1] == "x86_64-linux-gnu":
            continue
        if folder in TOOLKIT_FOLDERS:
            return posixpath.join(TOOLKIT_FOLDERS[folder], *names[index + 1 :])
    return None


def unpack(src, folder):
    """Unpack the files for the toolkit into `folder`, and return their paths relative to it.

    Raises Refused for a path or a link that leads out of the archive.
    """
    files = []
    work = folder + ".work"
    os.makedirs(work)
    for tar in find_tars(src, work):
        with tarfile.open(tar) as archive:
            for member in archive:
                path = toolkit_path(member)
                if path is None:
                    continue
                target = os.path.join(folder, path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                # tarfile's extract() would follow a link that an earlier member made, and write
                # outside of `folder`.
                if member.issym():
                    if os.path.isabs(member.linkname) or ".." in member.linkname.split("/"):
                        raise Refused(
                            "it contains a link to a place outside of it: %s" % member.name
                        )
                    os.symlink(member.linkname, target)
                else:
                    with archive.extractfile(member) as source, open(target, "wb") as output:
                        shutil.copyfileobj(source, output)
                    # Every user has to read the files, whatever their modes in the archive are.
                    os.chmod(target, 0o755 if member.mode & 0o100 else 0o644)
                files.append(path)
    return files


def install(toolkit, name, src, digest):
    """Install an archive, and return its files.

    digest: the archive's SHA-256. Raises Refused, OSError and tarfile's errors, before the first
    file is moved.
    """
    # In the toolkit, so that os.replace below moves files within one file system.
    folder = os.path.join(toolkit, ".tandem", name + ".new")
    delete_temporary_folders(folder)
    try:
        files = unpack(src, folder)
        if not any(file.startswith("lib64/lib" + name) for file in files):
            raise Refused("it contains no library of %s: is it another archive?" % name)
        # Files of the same part may be replaced, but no file that NVIDIA's installer or a person
        # put there.
        old_files = read_record(toolkit, name)["files"]
        for file in sorted(set(files) - set(old_files)):
            if os.path.lexists(os.path.join(toolkit, file)):
                raise Refused(
                    "%s/%s already exists, and Tandem did not put it there" % (toolkit, file)
                )
        # The record comes first, so that it lists every file even after a kill.
        write_record(toolkit, name, None, set(files) | set(old_files))
        for file in files:
            target = os.path.join(toolkit, file)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(os.path.join(folder, file), target)
        delete_files(toolkit, set(old_files) - set(files))
        write_record(toolkit, name, digest, files)
        return files
    finally:
        delete_temporary_folders(folder)


def delete_temporary_folders(folder):
    """Delete the temporary folders of an installation, also of one that was killed."""
    for path in (folder, folder + ".work"):
        shutil.rmtree(path, ignore_errors=True)


def delete_files(toolkit, files):
    """Delete files of the toolkit, and ignore those that are missing already."""
    for file in files:
        path = os.path.join(toolkit, file)
        if os.path.lexists(path):
            os.unlink(path)


def remove(toolkit, name):
    """Remove the files of an archive. Returns true if the archive was installed."""
    record = record_path(toolkit, name)
    delete_temporary_folders(os.path.join(toolkit, ".tandem", name + ".new"))
    if not os.path.exists(record):
        return False
    delete_files(toolkit, read_record(toolkit, name)["files"])
    os.unlink(record)  # the last step, so that a second call continues after a kill
    return True


def ensure_present(module):
    """Install the archive if the toolkit lacks its files, and return the module's result."""
    params = module.params
    toolkit, name, digest = params["toolkit"], params["name"], params["sha256"]
    record = read_record(toolkit, name)
    is_complete = all(os.path.lexists(os.path.join(toolkit, file)) for file in record["files"])
    is_needed = record["sha256"] != digest or not is_complete
    # Role cuda copies the archive to the machine only if it is needed, so `src` may not exist.
    if module.check_mode or not is_needed:
        return {"changed": is_needed, "wanted": is_needed, "files": record["files"]}
    actual = hash_file(params["src"])
    if actual != digest:
        raise Refused("its SHA-256 is %s and should be %s: it is broken" % (actual, digest))
    files = install(toolkit, name, params["src"], digest)
    return {"changed": True, "wanted": True, "files": files}


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "toolkit": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "src": {"type": "path"},
            "sha256": {"type": "str"},
        },
        required_if=[("state", "present", ["sha256"])],
        supports_check_mode=True,
    )
    params = module.params
    try:
        if params["state"] == "present":
            module.exit_json(**ensure_present(module))
        is_recorded = os.path.exists(record_path(params["toolkit"], params["name"]))
        changed = is_recorded if module.check_mode else remove(params["toolkit"], params["name"])
        module.exit_json(changed=changed, files=[])
    except (Refused, tarfile.TarError, EOFError) as error:
        module.fail_json(msg="%s could not be used: %s." % (params["src"], error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            module.fail_json(
                msg="There is not enough space in %s for %s: make room, and run again."
                % (params["toolkit"], params["name"])
            )
        module.fail_json(msg="%s could not be used: %s." % (params["src"], error))


if __name__ == "__main__":
    main()
