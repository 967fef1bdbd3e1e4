"""What planning needs to know of this machine: GPUs, ports in use, proxy variables, what its own name leads to."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from muster.placement import Facts
from muster.plan import PROXIES


def facts_here(busy: frozenset[int] = frozenset()) -> Facts:
    """``busy``: ports to leave alone besides those that something listens on."""
    return Facts(
        gpus=gpus_here(),
        busy=busy | _listening(),
        proxies={n: os.environ[n] for n in PROXIES if os.environ.get(n)},
        no_proxy=os.environ.get("no_proxy", ""),
        own_name=own_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=os.environ.get("TF_NUM_INTRAOP_THREADS", ""),
    )


def gpus_here() -> tuple[int, ...]:
    """Indices of this machine's GPUs by NVML, narrowed to CUDA_VISIBLE_DEVICES where that is set."""
    if not any(Path("/proc/driver/nvidia").glob("version")) and "FAKE_NVML" not in os.environ:
        return ()  # no driver: loading its library could only fail
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    return shown(os.environ.get("CUDA_VISIBLE_DEVICES"), names)


def shown(visible: str | None, names: Sequence[str]) -> tuple[int, ...]:
    """Which of the GPUs called ``names`` CUDA_VISIBLE_DEVICES shows: it holds indices, or beginnings of such names
    (``GPU-1a2b``), as schedulers write them. All, where it is not set."""
    if visible is None:
        return tuple(range(len(names)))
    words = [word.strip() for word in visible.split(",")]
    found = [gpu for word in words for gpu, name in enumerate(names) if word == str(gpu) or _begins(name, word)]
    return tuple(dict.fromkeys(found))


def _begins(name: str, word: str) -> bool:
    return word.startswith("GPU-") and name.startswith(word)


def _listening() -> frozenset[int]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        found |= {int(row.split()[1].rpartition(":")[2], 16) for row in rows if row.split()[3] == "0A"}
    return frozenset(found)


def own_name() -> str:
    """A sentence if this machine's own name leads to a loopback address (as Debian writes it), else nothing."""
    name = socket.gethostname()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return ""
    loop = sorted(a for a in found if a.startswith("127."))
    return (
        f"{name} is {loop[0]} in its own hosts file, so it announces an address that nobody else can reach"
        if loop
        else ""
    )
