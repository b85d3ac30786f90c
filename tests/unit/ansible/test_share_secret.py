"""The password of a share: made once, encrypted, readable by its owner alone, and never shown."""

from ansible.parsing.vault import VaultLib, VaultSecret

from tests.unit.ansible.provision_machines import ansible_playbook

PLAY = """
- name: Made here
  hosts: localhost
  gather_facts: false
  roles: [share_secret]

- name: Given for an existing server
  hosts: localhost
  gather_facts: false
  vars: {share_secret_given: "of-the-windows-pc"}
  roles: [share_secret]
  post_tasks:
    - name: Use it
      ansible.builtin.copy:
        content: "{{ share_secret_password }}"
        dest: "{{ share_secret_folder }}/used"
        mode: "0600"
      no_log: true
"""


def test_a_password_is_made_sealed_and_never_shown(tmp_path):
    folder = tmp_path / "secret"
    done = ansible_playbook(tmp_path, PLAY, "-vvv", "-e", f"share_secret_folder={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    key = (folder / "vault-pass").read_text()
    sealed = (folder / "share.vault").read_bytes()
    password = VaultLib([("default", VaultSecret(key.encode()))]).decrypt(sealed).decode()
    assert len(password) == 32 and password != key
    assert (folder / "used").read_text() == "of-the-windows-pc"
    modes = [oct(path.stat().st_mode & 0o777) for path in (folder, *sorted(folder.iterdir()))]
    assert modes == ["0o700", "0o600", "0o600", "0o600"]
    for secret in (key, password, "of-the-windows-pc"):
        assert secret not in done.stdout + done.stderr
