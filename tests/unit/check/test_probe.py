"""The facts of this computer, with sockets, files and a fake driver in place of a cluster."""

import ast
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from muster.check import probe

STUB = r"""
#include <stdio.h>
#include <string.h>
typedef struct{unsigned long long total,free,used;} mem;
typedef struct{unsigned pid;unsigned long long used;unsigned gi,ci;} proc;
int nvmlInit_v2(void){return 0;} int nvmlShutdown(void){return 0;}
static int cp(char*d,unsigned n,const char*s){snprintf(d,n,"%s",s);return 0;}
int nvmlSystemGetDriverVersion(char*d,unsigned n){return cp(d,n,"580.95.05");}
int nvmlSystemGetCudaDriverVersion(int*v){*v=12080;return 0;}
int nvmlDeviceGetCount_v2(unsigned*c){*c=2;return 0;}
int nvmlDeviceGetHandleByIndex_v2(unsigned i,void**h){*h=(void*)(long)(i+1);return i==1?15:0;}
int nvmlDeviceGetName(void*h,char*d,unsigned n){return cp(d,n,"NVIDIA H100 80GB HBM3");}
int nvmlDeviceGetUUID(void*h,char*d,unsigned n){return cp(d,n,"GPU-0");}
int nvmlDeviceGetMemoryInfo(void*h,mem*m){m->total=80ull<<30;m->used=3ull<<30;m->free=77ull<<30;return 0;}
int nvmlDeviceGetCudaComputeCapability(void*h,int*a,int*b){*a=9;*b=0;return 0;}
int nvmlDeviceGetComputeRunningProcesses_v3(void*h,unsigned*n,proc*p){*n=1;p[0].pid=PID;p[0].used=2ull<<30;return 0;}
"""


def test_all_sections_answer_here_and_quickly() -> None:
    began = time.monotonic()
    facts = probe.facts({"names": ["localhost"], "script": __file__, "checkpoints": "/tmp"})
    assert time.monotonic() - began < 2
    assert not [name for name, told in facts.items() if {"late", "broken"} & set(told)]
    assert facts["python"]["executable"] == sys.executable
    assert facts["names"]["found"]["localhost"]
    assert facts["packages"]["numpy"]


def test_a_section_that_hangs_or_breaks_costs_the_others_nothing() -> None:
    release = threading.Event()
    told = probe.together({"hangs": release.wait, "breaks": lambda: 1 // 0, "good": lambda: 1}, 0.05)
    release.set()
    assert told == {
        "hangs": {"late": True},
        "breaks": {"broken": "ZeroDivisionError: integer division or modulo by zero"},
        "good": 1,
    }


def test_build_info_is_read_and_not_run() -> None:
    told = "collections.OrderedDict([('is_cuda_build', True), ('cuda_version', '12.5.1')])"
    text = f"import collections\nbuild_info = {told}\n"
    assert probe._assigned(ast.parse(text), "build_info") == {"is_cuda_build": True, "cuda_version": "12.5.1"}
    assert probe._assigned(ast.parse("build_info = {'a': boom()}"), "build_info") == {}
    assert probe._assigned(ast.parse(""), "build_info") == {}


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="no TensorFlow here")
def test_tensorflows_build_is_known_without_importing_it() -> None:
    before = set(sys.modules)
    assert "is_cuda_build" in probe.build({})
    assert not {name for name in set(sys.modules) - before if name.startswith("tensorflow")}


def test_names_give_addresses_or_the_resolvers_words() -> None:
    assert probe.resolve("127.0.0.1") == ["127.0.0.1"]
    assert isinstance(probe.resolve("no such name"), str)


def test_a_port_is_free_or_its_holder_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = probe.ports({"ports": [["ps/0", "127.0.0.1", port]]})[str(port)]
        assert (told["free"], told["error"]) == (False, "EADDRINUSE")
        assert told["holder"]["pid"] == os.getpid()
        assert told["holder"]["command"].startswith(probe.process(os.getpid())["command"][:20])
    assert probe.ports({"ports": [["ps/0", "127.0.0.1", port]]})[str(port)]["free"]


def test_a_port_that_is_held_for_ipv6_only_is_taken_all_the_same() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        told = probe.ports({"ports": [["ps/0", "127.0.0.1", server.getsockname()[1]]]})
    assert [(row["free"], row["error"], row["holder"]["pid"]) for row in told.values()] == [(False, "", os.getpid())]


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    assert probe.ports({"ports": [["ps/0", "192.0.2.1", 20999]]})["20999"]["error"] == "EADDRNOTAVAIL"


def test_a_process_of_ours_names_its_run() -> None:
    environ = {**os.environ, "MUSTER_RUN": "r7", "MUSTER_TASK": "ps/0"}
    child = subprocess.Popen(["sleep", "30"], env=environ)
    try:
        until = time.monotonic() + 5
        while (told := probe.process(child.pid))["command"] != "sleep 30" and time.monotonic() < until:
            time.sleep(0.005)  # it is still our copy, on its way to becoming sleep
        told = probe.process(child.pid)
        assert (told["run"], told["task"], told["command"]) == ("r7", "ps/0", "sleep 30")
    finally:
        child.kill()
        child.wait()
    assert probe.process(child.pid)["command"] == ""


def test_scripts_missing_wrong_and_right(tmp_path: Path) -> None:
    assert probe.script({}) == {}
    assert probe.script({"script": "no.py", "cwd": str(tmp_path)})["exists"] is False
    (tmp_path / "bad.py").write_text("x = 1\nif x\n    pass\n")
    assert probe.script({"script": "bad.py", "cwd": str(tmp_path)})["line"] == 2
    (tmp_path / "odd name é.py").write_text("# -*- coding: utf-8 -*-\nname = 'é'\n", encoding="utf-8")
    told = probe.script({"script": "odd name é.py", "cwd": str(tmp_path)})
    assert (told["exists"], told["fit"], told["legacy"]) == (True, 0, False) and "syntax" not in told
    (tmp_path / "loop.py").write_text("return 1\n")
    assert "outside function" in probe.script({"script": "loop.py", "cwd": str(tmp_path)})["syntax"]


def test_a_program_that_is_no_python_must_be_executable(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text("#!/bin/sh\nexec python3 'x\n")
    assert probe.script({"script": str(program)})["closed"] is True
    program.chmod(0o755)
    assert probe.script({"script": str(program)}) == {"path": str(program), "exists": True, "closed": False}


@pytest.mark.parametrize(
    ("text", "fit", "legacy"),
    [
        ("import keras\nmodel = keras.Sequential()\nmodel.fit(x)\n", 3, False),
        ("import keras\nbuild().fit(x)\nmodel.fit(y)\n", 2, False),
        ("import keras, muster\nmuster.fit(model, x)\n", 0, False),
        ("import keras\nfit(x)\ntrain = model.fit\n", 0, False),
        ("from sklearn.preprocessing import StandardScaler\nStandardScaler().fit(x)\n", 0, False),
        ("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\nfrom tensorflow import keras\nmodel.fit(x)\n", 4, True),
        ("import tf_keras\nmodel.fit(x)\n", 2, True),
    ],
)
def test_what_a_script_does_with_keras(tmp_path: Path, text: str, fit: int, legacy: bool) -> None:
    """EN-07: read, not run."""
    (tmp_path / "train.py").write_text(text)
    told = probe.script({"script": str(tmp_path / "train.py")})
    assert (told["fit"], told["legacy"]) == (fit, legacy)


def test_the_environment_is_the_one_that_the_tasks_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://p:1")
    monkeypatch.setenv("no_proxy", "a")
    told = probe.environment({"env": {"no_proxy": "a,b", "SECRET": "x"}})
    assert (told["http_proxy"], told["no_proxy"]) == ("http://p:1", "a,b") and "SECRET" not in told


def test_the_architecture_is_what_uname_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EN-09."""
    (tmp_path / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (tmp_path / "uname").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.machine({})["machine"] == "aarch64"
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe.machine({})["machine"] == platform.machine()


def test_libraries_are_looked_for_where_the_plan_says(tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.9").write_text("")
    assert probe._library("libcudnn.so.9", ["", str(tmp_path)]) == str(tmp_path / "libcudnn.so.9")
    assert probe._library("libno-such-thing.so.9", [str(tmp_path)]) is None


def test_places_and_their_mounts(tmp_path: Path) -> None:
    told = probe.place(str(tmp_path))
    assert told["exists"] and told["writable"] and told["free"] > 0 and "(" in told["mount"]
    assert probe.place(str(tmp_path / "no"))["exists"] is False


def test_nonces_are_written_read_and_removed(tmp_path: Path) -> None:
    def nonce(do: str, *marks: str) -> Any:
        return probe.nonce({"checkpoints": str(tmp_path), "do": do, "marks": marks})["done"]

    assert nonce("write", "x") == {"x": ""}
    assert nonce("write", "x") == {"x": "File exists"}
    assert nonce("read", "x", "y") == {"x": "", "y": "No such file or directory"}
    assert nonce("read", "../../x") == {"x": ""}, "a mark is a name in that folder and nothing else"
    (tmp_path / "x").write_text("z")
    assert nonce("read", "x") == {"x": "other content"}
    assert nonce("remove", "x") == {"x": ""} and not list(tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler for the fake driver")
def test_gpus_by_nvml(tmp_path: Path) -> None:
    source, library = tmp_path / "stub.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(STUB.replace("PID", str(os.getpid())))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    program = "import json; from muster.check import probe; print(json.dumps(probe.gpus({})))"
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    told = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    gpus = json.loads(told.stdout)
    first, lost = gpus["devices"]
    assert (gpus["source"], gpus["driver"], gpus["cuda"]) == ("nvml", "580.95.05", "12.8")
    assert (first["name"], first["total"], first["used"]) == ("NVIDIA H100 80GB HBM3", 80 << 30, 3 << 30)
    assert (first["capability"], first["users"][0]["pid"], first["users"][0]["used"]) == ("9.0", os.getpid(), 2 << 30)
    assert lost == {"index": 1, "error": "GPU is lost"}


def smi(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return probe._nvidia_smi()


def test_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        'case "$1" in *query-gpu*) echo "0, NVIDIA H100, GPU-0, 580.95.05, 81559, 3000";; '
        f'*) echo "GPU-0, {os.getpid()}";; esac'
    )
    told = smi(tmp_path, body, monkeypatch)
    assert told["driver"] == "580.95.05"
    assert told["devices"][0]["total"] == 81559 << 20
    assert told["devices"][0]["users"][0]["pid"] == os.getpid()
    broken = smi(tmp_path, 'echo "NVIDIA-SMI has failed because it could not talk to the driver."; exit 9', monkeypatch)
    assert broken["devices"] == [] and "could not talk" in broken["error"]
