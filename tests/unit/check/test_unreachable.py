"""What ssh says, word for word as OpenSSH 9.2 said it, and what we make of it."""

import pytest

from muster.check.unreachable import ssh_verdict

AT = "@" * 59 + "\n"
CHANGED = (
    AT
    + "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
    + AT
    + "IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING "
    "NASTY!\nSomeone could be eavesdropping on you right now (man-in-the-middle attack)!\n"
    "It is also possible that a host key has just been changed.\n"
    "The fingerprint for the ED25519 key sent by the remote host is\n"
    "SHA256:W0VJyIRNqJlno0clL3FirdCZbwT5nis7/xuvpCf7UsE.\nPlease contact your system administrator.\n"
    "Add correct host key in /home/ml/.ssh/known_hosts to get rid of this message.\n"
    "Offending ED25519 key in /home/ml/.ssh/known_hosts:3\n  remove with:\n"
    '  ssh-keygen -f "/home/ml/.ssh/known_hosts" -R "gpu-b"\n'
    "Host key for gpu-b has changed and you have requested strict checking.\nHost key verification failed.\n"
)
TOO_OPEN = (
    AT
    + "@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @\n"
    + AT
    + "Permissions 0644 for '/home/ml/.ssh/id' are too open.\n"
    "It is required that your private key files are NOT accessible by others.\nThis private key will be ignored.\n"
    'Load key "/home/ml/.ssh/id": bad permissions\nml@gpu-b: Permission denied (publickey).\n'
)
SAID = [
    ("ssh: Could not resolve hostname gpu-b: Name or service not known\n", 255, "no name", "resolve hostname"),
    (
        "ssh: Could not resolve hostname gpu-b: Temporary failure in name resolution\n",
        255,
        "no name",
        "Temporary failure",
    ),
    ("ssh: connect to host gpu-b port 23: Connection refused\n", 255, "refused", "port 23"),
    ("ssh: connect to host gpu-b port 22: Connection timed out\n", 255, "timeout", "timed out"),
    ("ssh: connect to host 10.99.0.1 port 22: Network is unreachable\n", 255, "no route", "10.99.0.1"),
    ("ssh: connect to host gpu-b port 22: No route to host\n", 255, "no route", "No route"),
    (
        "No ED25519 host key is known for gpu-b and you have requested strict checking.\n"
        "Host key verification failed.\n",
        255,
        "key unknown",
        "No ED25519 host key is known for gpu-b",
    ),
    (CHANGED, 255, "key changed", "SHA256:W0VJyIRNqJlno0clL3FirdCZbwT5nis7/xuvpCf7UsE"),
    (TOO_OPEN, 255, "key too open", "0644"),
    ("ml@gpu-b: Permission denied (publickey,password).\n", 255, "permission", "ml@gpu-b"),
    (
        "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.12 port 22\n",
        255,
        "busy sshd",
        "kex_exchange_identification",
    ),
    ("command-line: line 0: Bad configuration option: nonsense\n", 255, "config", "nonsense"),
    ("bash: line 1: /nope/python: No such file or directory\n", 127, "no python", "/nope/python"),
    ("bash: line 1: exec: nopython: not found\n", 127, "no python", "nopython"),
    (
        "bash: line 1: /etc/passwd: Permission denied\nbash: line 1: exec: /etc/passwd: cannot execute\n",
        126,
        "no python",
        "exec",
    ),
    ("Traceback ...\nConnectionRefusedError: Connection refused\n", 1, "broken", "Connection refused"),
    ("Fatal Python error: init_fs_encoding\n", 1, "broken", "init_fs_encoding"),
    ("something new\n", 255, "unknown", "something new"),
    ("", 255, "unknown", "said nothing"),
    ("", None, "silent", "time was up"),
]


@pytest.mark.parametrize(("stderr", "returncode", "kind", "because"), SAID)
def test_each_refusal_is_told_apart(stderr: str, returncode: int | None, kind: str, because: str) -> None:
    failure = ssh_verdict(stderr, returncode, "gpu-b")
    assert (failure.kind, because in failure.because) == (kind, True), failure
    assert failure.what and failure.try_


def test_noise_of_a_login_does_not_hide_the_cause() -> None:
    noisy = (
        "Welcome to gpu-b!\nno such identity: /x: No such file or directory\nml@gpu-b: Permission denied (publickey).\n"
    )
    assert ssh_verdict(noisy, 255).because == "ml@gpu-b: Permission denied (publickey)."


def test_remedies_name_files_and_hosts() -> None:
    changed, too_open = ssh_verdict(CHANGED, 255), ssh_verdict(TOO_OPEN, 255)
    assert "ssh-keygen -f /home/ml/.ssh/known_hosts -R gpu-b" in changed.try_
    assert "known_hosts:3" in changed.because
    assert too_open.try_ == "chmod 600 /home/ml/.ssh/id"
    finding = changed.finding("gpu-b")
    assert (finding.severity, finding.host, finding.kind) == ("error", "gpu-b", "ssh key changed")
