"""TLS 1.3 between hosts, under an authority made for this run: both sides show a certificate that names a task.

Keys come down the agent's pipe and stay in memory. ``load_cert_chain`` takes file names only, so it is given that of a
memory file, which has no name in any file system and is gone at once. Pythons built for old systems (conda's) have no
memfd: theirs lies in /dev/shm, which is memory too, without a name there either.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping


def context(papers: Mapping[str, str], server: bool) -> ssl.SSLContext:
    """``papers``: ``authority``, ``certificate`` and ``key`` in PEM, as ``muster.launch.authority`` issues them."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.check_hostname = not server
    made.load_verify_locations(cadata=papers["authority"])
    fd = _memory_file()
    try:
        os.write(fd, (papers["key"] + papers["certificate"]).encode())
        made.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return made


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("muster-papers", os.MFD_CLOEXEC)
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def server_name(task: str) -> str:
    """The DNS name in the certificate of ``task``: what a worker insists on when it dials a ps."""
    return task.replace("/", "-") + ".muster"
