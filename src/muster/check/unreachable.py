"""Why ssh did not get us in, told from what it said. Pure: text in, finding out."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from muster.check.findings import Finding


@dataclass(frozen=True)
class Failure:
    """``kind`` is for programs; the rest are the rows of a finding."""

    kind: str
    what: str
    because: str
    try_: str

    def finding(self, host: str) -> Finding:
        return Finding("error", host, self.what, self.because, self.try_, kind=f"ssh {self.kind}")


Say = Callable[[str], Failure]


def ssh_verdict(stderr: str, returncode: int | None, destination: str = "HOST") -> Failure:
    """What ``stderr`` of ssh means. ``returncode`` None: it had not ended when its time was up."""
    if returncode in (126, 127):  # ssh got in; what the shell there says is not about the login
        return _no_python(stderr)
    if returncode in (255, None):
        for pattern, say in _RULES:
            if re.search(pattern, stderr):
                return say(stderr)
    if returncode is None:
        return Failure(
            "silent", "does not answer", _last(stderr) or "ssh was still waiting when its time was up", _REACH
        )
    if returncode != 255:
        because = _last(stderr) or f"it ended with exit {returncode} and said nothing"
        return Failure(
            "broken", "lets us in, but what Muster sends does not run there", because, f"ssh {destination} python3 -V"
        )
    because = _last(stderr) or "ssh ended with exit 255 and said nothing"
    return Failure("unknown", "cannot be reached by ssh", because, f"ssh -v {destination} true")


_REACH = "is it switched on, is the address right, does a firewall drop the ssh port?"


def _says(kind: str, what: str, try_: str, pattern: str = "") -> Say:
    return lambda stderr: Failure(kind, what, _line(stderr, pattern), try_)


def _line(stderr: str, pattern: str) -> str:
    """The line that says it; the last one where none does."""
    found = [line.strip() for line in stderr.splitlines() if pattern and re.search(pattern, line)]
    return found[0] if found else _last(stderr)


def _last(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _key_changed(stderr: str) -> Failure:
    print_, place = _found(r"(SHA256:[A-Za-z0-9+/=]+)", stderr), _found(r"Offending .* key in (\S+:\d+)", stderr)
    name = _found(r"Host key for (\S+) has changed", stderr)
    removal = f"ssh-keygen -f {place.rpartition(':')[0]} -R {name}" if place and name else "ssh-keygen -R HOST"
    return Failure(
        "key changed",
        "its host key is not the one that is known: another machine, a reinstalled one, or an attack",
        f"it now shows {print_ or 'another key'}; the old one is in {place or 'known_hosts'}",
        f"compare on the host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; if it is right: {removal}",
    )


def _key_open(stderr: str) -> Failure:
    file = _found(r"Permissions \d+ for '([^']+)' are too open", stderr) or "the key file"
    mode = _found(r"Permissions (\d+) for", stderr)
    return Failure(
        "key too open",
        "ssh does not use a private key that others can read",
        f"{file} has mode {mode or 'too open'}",
        f"chmod 600 {file}",
    )


def _no_python(stderr: str) -> Failure:
    return Failure(
        "no python",
        "the Python that is set for it does not start",
        _last(stderr),
        "set python for this host to the full path of the interpreter that has TensorFlow",
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


_STARTUPS = r"kex_exchange_identification|Exceeded MaxStartups|Not allowed at this time|Connection reset by .* port"

# In this order: ssh often says several of these, and the first one is the cause of those below it.
_RULES: tuple[tuple[str, Say], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _key_changed),
    (r"are too open", _key_open),
    (
        r"Could not resolve hostname",
        _says(
            "no name", "its name is not known here", "correct ssh for this host, or add the name to DNS or /etc/hosts"
        ),
    ),
    (
        r"host key is known for|Host key verification failed",
        _says(
            "key unknown",
            "its host key has never been confirmed",
            "log in once by hand and compare the fingerprint, or: ssh -o StrictHostKeyChecking=accept-new HOST true",
            r"host key is known for|verification failed",
        ),
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        _says(
            "permission",
            "it does not let us in without a password",
            "ssh-copy-id HOST, or name the right user and IdentityFile in ssh or ~/.ssh/config",
            r"Permission denied \(|Too many authentication",
        ),
    ),
    (
        _STARTUPS,
        _says(
            "busy sshd",
            "its sshd hangs up before login: too many logins at once, or a block list",
            "wait a little and try again; raise MaxStartups in its sshd_config; look for fail2ban",
            _STARTUPS,
        ),
    ),
    (
        r"Connection refused",
        _says("refused", "nothing listens at its ssh port", "is sshd running there, and is the port right?", "refused"),
    ),
    (r"[Tt]imed out|not responding", _says("timeout", "does not answer", _REACH, r"[Tt]imed out|not responding")),
    (
        r"No route to host|Network is unreachable|Host is down",
        _says("no route", "there is no way to it from here", _REACH, r"No route|unreachable|is down"),
    ),
    (
        r"Bad configuration option|terminating, \d+ bad configuration|Can't open user config|Bad owner or permissions",
        _says("config", "ssh does not accept its configuration file", "correct that line", r"[Bb]ad |Can't open"),
    ),
)
