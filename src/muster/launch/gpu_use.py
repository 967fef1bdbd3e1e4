"""Do our tasks use the GPUs that they were given? Asked of the driver, on the task's own host.

A process of its own for each look, which the agent starts and ends: a call into a driver that hangs never comes back.
It is given the task-side names only (``modules``), needs the standard library alone (3.8+), and prints one JSON line.

The driver names processes by the pid of the whole machine. In a container, which has pids of its own, those mean
nothing to us; there only a GPU on which nobody holds any memory is known to be idle, and all else is "cannot tell".
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from muster.check import probe

if TYPE_CHECKING:  # names for readers and for mypy; Python 3.8 could not make them
    from collections.abc import Iterable, Mapping

    Facts = dict[str, Any]

MODULES = ("muster", "muster.check", "muster.check.probe", "muster.launch", "muster.launch.gpu_use")
WHOLE_MACHINE = "pid:[4026531836]"  # the kernel's first pid namespace has this number, always
NOBODY = 32 << 20  # bytes: any context of CUDA holds more
LIBRARIES = {
    "TensorFlow": re.compile(r"/(_pywrap_tensorflow|libtensorflow_(cc|framework))"),
    "libcuda": re.compile(r"/libcuda\.so"),
    "libcudart": re.compile(r"/libcudart\.so"),
    "libcudnn": re.compile(r"/libcudnn\.so"),
}


def modules() -> list[tuple[str, str]]:
    """What the agent needs to make a look: names and source, in the order in which they are executed."""
    found = []
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in MODULES:
        path = os.path.join(root, *name.split(".")[1:]) + ".py"
        source = ""  # of a package, which only holds the others
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                source = file.read()
        found.append((name, source))
    return found


def look(request: Facts) -> Facts:
    """``request``: for each task of a host its pid, the GPUs that it was given, and whether it is to be ``asked``.

    For each task that is: ``used``, bytes by GPU (a GPU of which we cannot tell is left out); ``elsewhere``, GPUs that
    it uses instead; ``others``, who else is on its GPUs; and what helps to guess why a GPU is idle: the value of
    CUDA_VISIBLE_DEVICES that hides it (``hidden``), and which libraries of interest are ``loaded``. Nothing at all
    where there is no driver.
    """
    devices = {device["index"]: device for device in probe.gpus({}).get("devices", []) if "error" not in device}
    if not devices:
        return {}
    family, trusted = processes(), os.readlink("/proc/self/ns/pid") == WHOLE_MACHINE
    tasks = request["tasks"]
    marks = {pid: _marks(pid) for pid in family}
    pids = {name: of_task(task["pid"], family, marks) for name, task in tasks.items()}
    ours = set().union(*pids.values())
    found = {}
    for name, task in tasks.items():
        if task["asked"]:
            given = {index: devices[index] for index in task["gpus"] if index in devices}
            told = {str(index): use(device, pids[name], trusted) for index, device in given.items()}
            idle = [given[int(index)] for index, used in told.items() if used == 0]
            found[name] = {
                "used": {index: used for index, used in told.items() if used is not None},
                "elsewhere": [i for i, device in devices.items() if i not in given and use(device, pids[name], True)],
                "others": {str(i): said for i, d in given.items() if trusted and (said := strangers(d, ours))},
                "hidden": hidden(pids[name], idle),
                "loaded": loaded(pids[name]) if idle else [],
            }
    return found


def use(device: Mapping[str, Any], pids: set[int], trusted: bool) -> int | None:
    """Bytes that ``pids`` hold on a GPU; 1 where they are there and the driver gives no number; None: cannot tell.

    ``trusted``: pids of the driver are pids as we know them.
    """
    users = device.get("users")
    mine = [user for user in users or [] if user["pid"] in pids]
    if mine:
        held = [int(user.get("used", -1)) for user in mine]
        return sum(held) if all(0 <= number < 1 << 60 for number in held) else 1
    if device.get("held", NOBODY) < NOBODY:
        return 0
    proxied = any("nvidia-cuda-mps" in user.get("command", "") for user in users or [])  # it computes for others
    return None if users is None or proxied or not trusted else 0


def strangers(device: Mapping[str, Any], ours: set[int]) -> list[str]:
    others = [user for user in device.get("users") or [] if user["pid"] not in ours]
    return [f"pid {u['pid']} of {u['user'] or 'somebody'}: {u['command'][:80] or 'no command'}" for u in others[:4]]


def processes() -> dict[int, tuple[int, int]]:
    """Parent and session of every living process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            if fields[0] != b"Z":
                found[int(name)] = (int(fields[1]), int(fields[3]))
    return found


def of_task(pid: int, family: Mapping[int, tuple[int, int]], marks: Mapping[int, tuple[bytes, ...]]) -> set[int]:
    """The process of a task, its session, what descends from them, and who left both but carries its marks."""
    mark = marks.get(pid)
    found = {other for other, (_, session) in family.items() if session == pid or (mark and mark == marks[other])}
    todo = list(found | {pid})
    while todo:
        parent = todo.pop()
        children = [child for child, (its, _) in family.items() if its == parent and child not in found]
        found.update(children)
        todo += children
    return found | {pid}


def _environ(pid: int) -> dict[bytes, bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return dict(part.partition(b"=")[::2] for part in file.read().split(b"\0"))
    except OSError:  # another user's, or it has just ended
        return {}


def _marks(pid: int) -> tuple[bytes, ...]:
    environ = _environ(pid)
    marks = tuple(environ.get(name, b"") for name in (b"MUSTER_RUN", b"MUSTER_TASK"))
    return marks if all(marks) else ()


def hidden(pids: Iterable[int], idle: list[Facts]) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES, with which a process was started, that hides one of ``idle``; else None."""
    for pid in sorted(pids) if idle else ():
        told = _environ(pid).get(b"CUDA_VISIBLE_DEVICES")
        if told is not None and not all(shows(told.decode(errors="replace"), device) for device in idle):
            return told.decode(errors="replace")[:100]
    return None


def shows(visible: str, device: Mapping[str, Any]) -> bool:
    """Is ``device`` among CUDA_VISIBLE_DEVICES? It holds indices, or (the beginnings of) names such as GPU-1a2b."""
    for word in (word.strip() for word in visible.split(",")):
        named = word.startswith("GPU-") and str(device.get("uuid", "")).startswith(word)
        if named or word == str(device["index"]) or word.startswith("MIG-"):
            return True
    return False


def loaded(pids: Iterable[int]) -> list[str]:
    """Which of LIBRARIES any of ``pids`` has in its memory."""
    text = ""
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
                text += file.read()
        except OSError:  # another user's, or it has just ended
            continue
    return [name for name, pattern in LIBRARIES.items() if pattern.search(text)]
