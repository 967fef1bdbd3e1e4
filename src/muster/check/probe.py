"""What one host is: read by its own interpreter, on the host, with the standard library only (3.8+).

Every section runs in a thread of its own against one deadline, because any of them can hang for ever: a dead file
server holds ``stat`` in the kernel, a dead name server holds ``getaddrinfo``. A section that is late answers ``{"late":
true}`` and costs the others nothing. TensorFlow is never imported: its version is in its metadata and its CUDA versions
are in a file of plain text, and an import would take seconds, gigabytes and perhaps a GPU.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import fcntl
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import pwd
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names for readers and for mypy; Python 3.8 could not make them
    from collections.abc import Callable

    Request = dict[str, Any]
    Facts = dict[str, Any]

PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-rocm",
    "tf-nightly",
    "keras",
    "tf_keras",
    "numpy",
    "protobuf",
    "grpcio",
)
CUDA_PACKAGES = ("nvidia-cudnn-cu%s", "nvidia-cuda-runtime-cu%s", "nvidia-nccl-cu%s", "nvidia-cublas-cu%s")
VARIABLES = (
    "http_proxy",
    "https_proxy",
    "grpc_proxy",
    "all_proxy",
    "no_proxy",
    "no_grpc_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "TF_USE_LEGACY_KERAS",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "GRPC_POLL_STRATEGY",
)


def facts(request: Request) -> Facts:
    """All sections at once. ``request``: names, ports ([task, address, port]), cwd, script, checkpoints, env (what the
    plan gives the tasks here), tensorflow, within."""
    return together({name: _bound(section, request) for name, section in SECTIONS.items()}, request.get("within", 8.0))


def together(work: dict[str, Callable[[], Any]], within: float) -> dict[str, Any]:
    """Runs everything in ``work`` at the same time; what is not back ``within`` seconds is ``{"late": True}``."""
    done: dict[str, Any] = {}
    threads = [threading.Thread(target=_keep, args=(done, name, call), daemon=True) for name, call in work.items()]
    until = time.monotonic() + within
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return {name: done.get(name, {"late": True}) for name in work}


def _keep(done: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    try:
        done[name] = call()
    except Exception as error:  # a host may be broken in ways nobody thought of; that section says so, the others go on
        done[name] = {"broken": f"{type(error).__name__}: {error}"}


def _bound(section: Callable[[Request], Any], request: Request) -> Callable[[], Any]:
    return lambda: section(request)


# --- the interpreter and what it would import


def python(request: Request) -> Facts:
    return {
        "version": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "implementation": platform.python_implementation(),
    }


def packages(request: Request) -> Facts:
    build_info = build(request)
    cuda = str(build_info.get("cuda_version", "")).split(".")[0]
    wanted = PACKAGES + tuple(name % cuda for name in CUDA_PACKAGES if cuda)
    found = {name: _version(name) for name in wanted}
    return {name: version for name, version in found.items() if version}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def build(request: Request) -> Facts:
    """What ``tf.sysconfig.get_build_info()`` would say, read from the file where it is written; {} without
    TensorFlow."""
    spec = importlib.util.find_spec("tensorflow")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = os.path.join(folder, "python", "platform", "build_info.py")
        if os.path.exists(file):
            with open(file, "rb") as text:
                told = _assigned(ast.parse(text.read()), "build_info")
            return told or (_ask_tensorflow() if request.get("tensorflow") else {})
    return {}


def _assigned(tree: ast.Module, name: str) -> Facts:
    """The literal that ``name`` is given in ``tree``, as a dict or as ``OrderedDict([...])``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value: ast.expr = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            try:
                return dict(ast.literal_eval(value))
            except ValueError:  # computed by code in some future release: not ours to run
                return {}
    return {}


def _ask_tensorflow() -> Facts:
    program = "import json, tensorflow as tf; print('\\n' + json.dumps(dict(tf.sysconfig.get_build_info())))"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environ, timeout=60, check=False)
    lines = told.stdout.decode(errors="replace").splitlines()
    return dict(json.loads(lines[-1])) if lines and told.returncode == 0 else {}


def libraries(request: Request) -> Facts:
    """For each library that a CUDA build loads at run time: where it is found, or None. {} for a build without CUDA."""
    told = build(request)
    if not told.get("is_cuda_build"):
        return {}
    cuda, cudnn = str(told.get("cuda_version", "")).split(".")[0], str(told.get("cudnn_version", "")).split(".")[0]
    wanted = [("libcudart.so", cuda), ("libcublas.so", cuda), ("libcudnn.so", cudnn)]
    planned = str((request.get("env") or {}).get("LD_LIBRARY_PATH", "")).split(":")  # our own loader has not read it
    return {f"{name}.{major}": _library(f"{name}.{major}", planned) for name, major in wanted if major}


def _library(name: str, folders: list[str]) -> str | None:
    places = [os.path.join(folder, "nvidia", "*", "lib") for folder in sys.path]  # pip's wheels; TensorFlow looks there
    for place in places + [folder for folder in folders if folder]:
        found = glob.glob(os.path.join(place, name))
        if found:
            return found[0]
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


# --- GPUs


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Memory2(ctypes.Structure):
    """What processes hold stands apart from what the driver keeps for itself; since driver 510."""

    _fields_ = [("version", ctypes.c_uint), *((name, ctypes.c_ulonglong) for name in ("total", "kept", "free", "used"))]


class _User(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


NVML_SAID = {
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver",
    15: "GPU is lost",
    18: "driver/library version mismatch",
}


def gpus(request: Request) -> Facts:
    """Driver, the CUDA version it can do, and each GPU with its memory (bytes) and who uses it."""
    try:
        return _nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return _nvidia_smi()
    except AttributeError as error:  # a driver so old that a function is missing
        return {**_nvidia_smi(), "error": f"NVML: {error}"}


def _nvml(nvml: Any) -> Facts:
    code = nvml.nvmlInit_v2()
    if code:
        return {"source": "nvml", "error": NVML_SAID.get(code, f"NVML error {code}"), "devices": []}
    try:
        version, count = ctypes.c_int(), ctypes.c_uint()
        nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(version))
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return {
            "source": "nvml",
            "driver": _text(nvml.nvmlSystemGetDriverVersion),
            "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "devices": [_device(nvml, index) for index in range(count.value)],
        }
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Facts:
    handle = ctypes.c_void_p()
    code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    if code:
        return {"index": index, "error": NVML_SAID.get(code, f"NVML error {code}")}
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return {
        "index": index,
        "name": _text(nvml.nvmlDeviceGetName, handle),
        "uuid": _text(nvml.nvmlDeviceGetUUID, handle),
        "total": memory.total,
        "used": memory.used,
        "capability": f"{major.value}.{minor.value}",
        **_users(nvml, handle),
        **_held(nvml, handle),
    }


def _users(nvml: Any, handle: ctypes.c_void_p) -> Facts:
    """Who computes on it; nothing where the driver does not say."""
    count, room = ctypes.c_uint(64), (_User * 64)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), room):
        return {}
    return {"users": [{**process(room[i].pid), "used": room[i].used} for i in range(count.value)]}


def _held(nvml: Any, handle: ctypes.c_void_p) -> Facts:
    memory = _Memory2(ctypes.sizeof(_Memory2) | 2 << 24)
    if not hasattr(nvml, "nvmlDeviceGetMemoryInfo_v2"):
        return {}
    return {} if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) else {"held": memory.used}


def _text(call: Any, *before: Any) -> str:
    room = ctypes.create_string_buffer(96)
    return room.value.decode(errors="replace") if call(*before, room, ctypes.c_uint(96)) == 0 else ""


def _nvidia_smi() -> Facts:
    if not shutil.which("nvidia-smi"):
        return {"source": "none", "error": NVML_SAID[12], "devices": []}
    fields = "index,name,uuid,driver_version,memory.total,memory.used"
    told = _smi("--query-gpu=" + fields)
    if told.returncode:
        lines = told.stdout.decode(errors="replace").strip().splitlines() or [f"exit {told.returncode}"]
        return {"source": "nvidia-smi", "error": lines[0], "devices": []}
    rows = [[part.strip() for part in line.split(",")] for line in told.stdout.decode().splitlines() if line.strip()]
    users = [
        line.split(",")
        for line in _smi("--query-compute-apps=gpu_uuid,pid").stdout.decode().splitlines()
        if "," in line
    ]
    devices = [
        {
            "index": int(index),
            "name": name,
            "uuid": uuid,
            "total": int(total) << 20,
            "used": int(used) << 20,
            "users": [process(int(pid)) for owner, pid in users if owner.strip() == uuid],
        }
        for index, name, uuid, _, total, used in rows
    ]
    return {"source": "nvidia-smi", "driver": rows[0][3] if rows else "", "devices": devices}


def _smi(query: str) -> subprocess.CompletedProcess[bytes]:
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=6, check=False)


# --- the machine


def clock(request: Request) -> Facts:
    return {"now": time.time()}


def machine(request: Request) -> Facts:
    return {
        "system": platform.system(),
        "machine": _architecture(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
    }


def _architecture() -> str:
    """What ``uname -m`` prints, since that is what a person would type to see whether we are right."""
    try:
        told = subprocess.run(["uname", "-m"], stdout=subprocess.PIPE, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):  # a host so bare has a kernel all the same
        return platform.machine()
    return told.stdout.decode(errors="replace").strip() or platform.machine()


def environment(request: Request) -> Facts:
    """As the tasks will have it: what a login has here, and over it what the plan gives them."""
    environ = {**os.environ, **(request.get("env") or {})}
    return {name: environ[name] for name in VARIABLES if name in environ}


def limits(request: Request) -> Facts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"files": soft, "files_most": hard}


def names(request: Request) -> Facts:
    """The host's own name and, for it and each name asked for, its addresses here, or the resolver's error as a
    text."""
    own = socket.gethostname()
    asked = dict.fromkeys([own, *request.get("names", [])])
    within = max(1.0, request.get("within", 8.0) - 1)
    return {"own": own, "found": together({name: _resolving(name) for name in asked}, within)}


def _resolving(name: str) -> Callable[[], Any]:
    return lambda: resolve(name)


def resolve(name: str) -> Any:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return str(error.args[-1])
    return sorted({str(entry[4][0]) for entry in found})


# --- interfaces


def interfaces(request: Request) -> Facts:
    """The IPv4 addresses of this host, loopback left out, and in what kind of container it is, if it is in one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:  # an interface without an address
                continue
            found.append(socket.inet_ntoa(told[20:24]))
    return {"addresses": [address for address in found if not address.startswith("127.")], "container": _container()}


def _container() -> str:
    for path, kind in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
        if os.path.exists(path):
            return kind
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    try:
        with open("/proc/1/cgroup") as text:
            said = text.read()
    except OSError:  # not Linux
        return ""
    signs = (("kubepods", "Kubernetes"), ("docker", "Docker"), ("libpod", "Podman"), ("lxc", "LXC"))
    return next((kind for sign, kind in signs if sign in said), "")


# --- ports


def ports(request: Request) -> Facts:
    """For each port of the plan: ``free``, else why not (``error``) and who holds it (``holder``)."""
    wanted = [(str(address), int(port)) for _, address, port in request.get("ports", [])]
    bound = {port: _bindable(address, port) for address, port in wanted}
    taken = {
        port: socks for port in bound for socks in [_sockets(port)] if bound[port] or any(s["listens"] for s in socks)
    }
    holders = _holders([sock["inode"] for socks in taken.values() for sock in socks])
    low, high = _ephemeral()
    return {
        str(port): {
            "free": port not in taken,
            "error": bound[port],
            "holder": _holder(taken.get(port, []), holders),
            "ephemeral": low <= port <= high,
        }
        for port in bound
    }


def _bindable(address: str, port: int) -> str:
    """Why ``port`` cannot be bound at ``address`` or at all addresses, as the name of an errno; "" if it can."""
    found = resolve(address)
    for where in [*(found if isinstance(found, list) else []), "0.0.0.0"]:
        with socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((where, port))
            except OSError as error:
                return errno.errorcode.get(error.errno or 0, str(error))
    return ""


def _ephemeral() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as text:
            low, high = text.read().split()
        return int(low), int(high)
    except (OSError, ValueError):  # not Linux: then nobody knows, and nothing is said
        return 0, -1


def _sockets(port: int) -> list[Facts]:
    """The TCP sockets of this host whose own port is ``port``; inode 0 belongs to no process any more."""
    rows = [row for family in ("tcp", "tcp6") for row in table(family)]
    return [
        {"inode": int(row[9]), "uid": int(row[7]), "listens": row[3] == "0A"}
        for row in rows
        if int(row[1].rpartition(":")[2], 16) == port and int(row[9])
    ]


def table(family: str) -> list[list[str]]:
    """The rows of /proc/net/``family`` as words; [] where there is none."""
    try:
        with open(f"/proc/net/{family}") as text:
            return [line.split() for line in text.readlines()[1:]]
    except OSError:
        return []


def _holders(inodes: list[int]) -> dict[int, int]:
    """The pid that has each socket of ``inodes`` open, as far as we may look."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()] if wanted else []:
        for link in _links(pid):
            if link in wanted:
                found.setdefault(wanted[link], pid)
    return found


def _links(pid: int) -> list[str]:
    links = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:  # another user's, or it has just ended
        pass
    return links


def _holder(socks: list[Facts], holders: dict[int, int]) -> Facts | None:
    for sock in sorted(socks, key=lambda sock: not sock["listens"]):
        if sock["inode"] in holders:
            return process(holders[sock["inode"]])
    return {"pid": 0, "user": _user(socks[0]["uid"]), "command": ""} if socks else None


def process(pid: int) -> Facts:
    """Who ``pid`` is: user, command, and its run if it is a task of ours. Empty texts where we may not look."""
    told: Facts = {"pid": pid, "user": "", "command": "", "run": "", "task": ""}
    try:
        told["user"] = _user(os.stat(f"/proc/{pid}").st_uid)
        with open(f"/proc/{pid}/cmdline", "rb") as text:
            told["command"] = text.read(400).replace(b"\0", b" ").decode(errors="replace").strip()
        with open(f"/proc/{pid}/environ", "rb") as text:
            environ = dict(part.partition(b"=")[::2] for part in text.read().split(b"\0"))
        told["run"] = environ.get(b"MUSTER_RUN", b"").decode(errors="replace")
        told["task"] = environ.get(b"MUSTER_TASK", b"").decode(errors="replace")
    except OSError:  # another user's, or it has just ended: what we have is what we may know
        pass
    return told


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --- files


def script(request: Request) -> Facts:
    """Is the script here, does this interpreter accept its syntax, and what of Keras does it use: the line of its
    first ``fit``, and whether it asks for Keras 2 itself?"""
    path = request.get("script") or ""
    if not path:
        return {}
    path = os.path.join(os.path.expanduser(request.get("cwd") or "."), path)
    if not os.path.isfile(path):
        return {"path": path, "exists": False}
    if not path.endswith(".py"):
        return {"path": path, "exists": True, "closed": not os.access(path, os.X_OK)}
    try:
        with open(path, "rb") as text:
            source = text.read()
        tree = ast.parse(source, path)
        compile(tree, path, "exec", dont_inherit=True)  # a return outside of a function is noticed only now
    except OSError as error:
        return {"path": path, "exists": True, "unreadable": error.strerror}
    except (SyntaxError, ValueError) as error:
        return {"path": path, "exists": True, "syntax": str(error.args[0]), "line": getattr(error, "lineno", None) or 0}
    legacy = b"TF_USE_LEGACY_KERAS" in source or b"tf_keras" in source
    return {"path": path, "exists": True, "fit": _fit(tree) if b"keras" in source else 0, "legacy": legacy}


def _fit(tree: ast.Module) -> int:
    """The line of the first call of a model's ``fit``; 0 where there is none. ``muster.fit`` is another thing."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    fits = [call for call in called if isinstance(call, ast.Attribute) and call.attr == "fit"]
    return min((fit.lineno for fit in fits if getattr(fit.value, "id", "") != "muster"), default=0)


def cwd(request: Request) -> Facts:
    return place(request.get("cwd") or ".")


def checkpoints(request: Request) -> Facts:
    return place(request["checkpoints"]) if request.get("checkpoints") else {}


def place(path: str) -> Facts:
    """A folder: does it exist, may we write, how many bytes are free, and what is it mounted from?"""
    path = os.path.realpath(os.path.expanduser(path))
    if not os.path.isdir(path):
        return {"path": path, "exists": False}
    room = os.statvfs(path)
    return {
        "path": path,
        "exists": True,
        "writable": os.access(path, os.W_OK | os.X_OK),
        "free": room.f_bavail * room.f_frsize,
        "mount": _mount(path),
    }


def _mount(path: str) -> str:
    """``source (type)`` of the file system that holds ``path``."""
    best = ("", "")
    try:
        with open("/proc/self/mounts") as text:
            for line in text:
                source, point, kind = line.split()[:3]
                if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
                    best = (point, f"{source} ({kind})")
    except OSError:  # not Linux
        pass
    return best[1]


# --- is a folder really shared? each host writes a file, each looks for everybody's, each removes its own


def nonce(request: Request) -> Facts:
    """``do`` is write, read or remove; ``marks`` are the names of the files. Names are new for every check: a file
    server's client may remember for half a minute that a name did not exist, but not of a name that it never asked
    for."""
    folder = os.path.expanduser(request["checkpoints"])
    marks = [os.path.basename(mark) for mark in request["marks"]]
    act = {"write": _write, "read": _read, "remove": _remove}[request["do"]]
    return together(
        {"done": lambda: {mark: act(os.path.join(folder, mark), mark) for mark in marks}}, request.get("within", 5.0)
    )


def _write(path: str, mark: str) -> str:
    try:
        with open(path, "x") as file:
            file.write(mark)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read(path: str, mark: str) -> str:
    try:
        with open(path) as file:
            return "" if file.read(200) == mark else "other content"
    except OSError as error:
        return error.strerror or str(error)


def _remove(path: str, mark: str) -> str:
    try:
        os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


SECTIONS: dict[str, Callable[[Request], Any]] = {
    "python": python,
    "packages": packages,
    "build": build,
    "libraries": libraries,
    "gpus": gpus,
    "machine": machine,
    "environment": environment,
    "limits": limits,
    "names": names,
    "interfaces": interfaces,
    "ports": ports,
    "script": script,
    "cwd": cwd,
    "checkpoints": checkpoints,
}
