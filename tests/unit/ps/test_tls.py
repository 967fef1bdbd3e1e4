"""The parts of TLS and of shared memory that depend on how this Python was built."""

import os
import ssl

import pytest

from muster.launch.authority import Authority
from muster.ps import room, tls


@pytest.fixture(params=[True, False], ids=["memfd", "no memfd"])
def memfd(request, monkeypatch):
    if not request.param:  # as in a Python that was built against an old C library
        monkeypatch.delattr(os, "memfd_create")
    return request.param


def test_the_key_is_loaded_from_memory_and_its_file_is_closed(memfd):
    papers = Authority("run-1").papers("worker/0")
    before = len(os.listdir("/proc/self/fd"))
    made = tls.context(papers, server=False)
    assert len(os.listdir("/proc/self/fd")) == before
    assert made.minimum_version is ssl.TLSVersion.TLSv1_3 and made.verify_mode is ssl.CERT_REQUIRED
    other = {**papers, "key": Authority("run-2").papers("worker/0")["key"]}
    with pytest.raises(ssl.SSLError):  # so the key was read: it is not that of the certificate
        tls.context(other, server=False)


def test_memory_is_shared_only_where_it_can_be_sealed(memfd):
    assert room.can_share() is memfd
