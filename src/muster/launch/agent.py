"""The agent: one small process on each machine of a run, and the only parent that its tasks have.

It is sent down the launcher's pipe, so it is one file, needs the standard library alone (Python 3.8+), and is the same
on this machine as on the far side of an ssh connection.

Rules:

- The pipe is the lease. End of file on it, or (where the launcher asks for a heartbeat) silence for ``lease`` seconds,
  ends every task: TERM, a second, KILL, sweep. So a launcher that is killed leaves nothing behind, anywhere.
- It is a subreaper: whatever a task leaves behind, in whatever session, becomes a child of the agent instead of
  escaping. Everything below the agent that belongs to no living task is a stray of a task, and goes with it. A task
  also asks the kernel to be killed should the agent itself be killed (PR_SET_PDEATHSIG).
- Never two copies of a task. Before a task is started again, whatever an earlier agent left of it on this machine (one
  that was cut off and does not know yet that its lease is over) is ended.
- Exits come from the kernel (SIGCHLD, waitpid); so do stops (SIGSTOP), by WUNTRACED.
- Whether a task uses the GPUs that it was given is seen by a short-lived child (LOOK), since a driver can hang.
- One thread, one selector. A task's output is read as long as the launcher takes it; else the pipe fills and the task
  waits, which is better than losing lines or growing without bound.

Down the pipe come frames of a 4-byte length and JSON (``verb``); up go frames of a type byte and a 4-byte length:
``E`` an event of ours (JSON, without a time: the launcher's clock is the only one), ``R`` one that a task reports (it
may say what it does, not that it has ended), ``O`` output (task, attempt, bytes, with NUL between them), ``B`` the
answer to a heartbeat (empty).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pwd
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from collections.abc import Iterator
from typing import IO, Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MARK = b"\n--muster-agent--\n"  # what a login shell prints before this is not ours
UNDYING = 5.0  # seconds after KILL from which a process counts as one that cannot be killed
LAST_GRACE = 1.0  # between TERM and KILL when the lease is over
BACKLOG = 4 << 20  # bytes waiting for the launcher beyond which we stop reading the tasks' output
PORT_EVERY = 0.2  # seconds between looks at the ports of tasks that do not listen yet
TAIL = 1 << 16  # bytes of output in which the last traceback is looked for: TensorFlow's own can be long
LOOK_LIMIT = 20.0  # seconds for a look at the GPUs; one that cannot even be killed is the last
REPORT_LINE = 1 << 16
HEADER = struct.Struct(">cI")
LENGTH = struct.Struct(">I")
MAX_FRAME = 64 << 20
NO_CUDA = (  # what TensorFlow says when it goes on without a GPU, since version 1
    b"Could not find cuda drivers",
    b"Cannot dlopen some GPU libraries",
    b"Could not load dynamic library 'libcu",
    b"failed call to cuInit",
    b"CUDA_ERROR_",
)
LOOK = """
import json, os, sys, types
told = json.loads(sys.stdin.read())
for name, source in told["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
sys.stdout.write(json.dumps(module.look(told["request"])))
sys.stdout.flush()
os._exit(0)
"""


class Task:
    def __init__(self, order: dict[str, Any]) -> None:
        self.id: str = order["task"]
        self.attempt: int = order["attempt"]
        self.port: int = order.get("port") or 0
        self.proc: subprocess.Popen[bytes] | None = None
        self.out = -1
        self.inp = -1  # the terminal's master side, where there is one
        self.channel: socket.socket | None = None
        self.heard = b""  # a report line that is not complete yet
        self.tail = bytearray()
        self.listening = self.taken = False
        self.kill_at: float | None = None
        self.killed_at: float | None = None
        self.code: int | None = None
        self.gpus: list[int] = order.get("gpus") or []
        self.born = time.monotonic()
        self.no_cuda = ""  # the line in which its TensorFlow said that it goes on without a GPU
        self.used: dict[str, Any] | None = None  # what the last look found, where it was worth telling

    @property
    def pid(self) -> int:
        return self.proc.pid if self.proc else 0


class Agent:
    def __init__(self, rfd: int, wfd: int) -> None:
        self.rfd, self.wfd = rfd, wfd
        self.tasks: dict[str, Task] = {}
        self.selector = selectors.DefaultSelector()
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.lease: float | None = None
        self.heard_at = time.monotonic()
        self.run = ""
        self.scratch = ""  # the folder of local sockets is /tmp/muster-UID-SCRATCH
        self.path = ""  # of the zip with the task-side code
        self.code: IO[bytes] | None = None  # that zip, where it came down the pipe
        self.last_grace = LAST_GRACE
        self.closing: float | None = None  # since when
        self.ports_at = 0.0
        self.look: Look | None = None
        self.look_modules: list[Any] = []  # what a look is made of; none: nobody wants to know
        self.look_every = 60.0
        self.looked_at = float("-inf")
        self.ooms = _oom_kills()
        self.libc = ctypes.CDLL(None, use_errno=True)

    # --- the loop

    def serve(self) -> None:
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTTOU, signal.SIGTTIN):
            signal.signal(sig, signal.SIG_IGN)
        ring_r, ring_w = socket.socketpair()
        for sock in (ring_r, ring_w):
            sock.setblocking(False)
        signal.set_wakeup_fd(ring_w.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.close("TERM"))
        for fd in (self.rfd, self.wfd):
            os.set_blocking(fd, False)
        self.selector.register(self.rfd, selectors.EVENT_READ, ("pipe", None))
        self.selector.register(ring_r, selectors.EVENT_READ, ("ring", ring_r))
        os.write(self.wfd, MARK)
        while self.closing is None or self.tasks:
            self._turn()
        self._sweep_all()
        self._flush_at_last()

    def _turn(self) -> None:
        writing = bool(self.outbox) and self.wfd >= 0
        if writing:
            self._write()
        for key, _ in self.selector.select(self._timeout()):
            what, who = key.data
            if what == "pipe":
                self._read_pipe()
            elif what == "ring":
                with contextlib.suppress(BlockingIOError):
                    who.recv(4096)
            elif what == "output":
                self._read_output(who)
            elif what == "report":
                self._read_reports(who)
            elif what == "look":
                self._read_look(who)
        self._reap()
        now = time.monotonic()
        self._look_at_gpus(now)
        if self.lease and now - self.heard_at > self.lease:
            self.close("no heartbeat from the launcher for %g s" % self.lease, lapsed=True)
        for task in list(self.tasks.values()):
            if task.kill_at is not None and now >= task.kill_at:
                task.kill_at = None
                task.killed_at = now
                self._signal(task, signal.SIGKILL)
            if task.killed_at is not None and now >= task.killed_at + UNDYING:
                self._give_up(task)
        if now >= self.ports_at:
            self.ports_at = now + PORT_EVERY
            self._look_at_ports()

    def _timeout(self) -> float:
        now = time.monotonic()
        moments = [now + 1.0]
        if any(t.port and not t.listening for t in self.tasks.values()):
            moments.append(self.ports_at)
        moments += [t.kill_at for t in self.tasks.values() if t.kill_at is not None]
        if self.outbox and self.wfd >= 0:
            moments.append(now + 0.02)
        return max(0.0, min(moments) - now)

    # --- the pipe

    def _read_pipe(self) -> None:
        try:
            got = os.read(self.rfd, 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        if not got:
            self.selector.unregister(self.rfd)
            self.close("the launcher is gone")
            return
        self.heard_at = time.monotonic()
        self.inbox += got
        while len(self.inbox) >= 4:
            (size,) = LENGTH.unpack_from(self.inbox)
            if size > MAX_FRAME:
                self.close("a frame of %d bytes" % size)
                return
            if len(self.inbox) < 4 + size:
                return
            order = json.loads(bytes(self.inbox[4 : 4 + size]))
            del self.inbox[: 4 + size]
            self._obey(order)

    def _obey(self, order: dict[str, Any]) -> None:
        verb = order["verb"]
        task = self.tasks.get(order.get("task", ""))
        if verb == "hello":
            self.run, self.lease = order["run"], order.get("lease")
            self.scratch = order.get("scratch", "").replace("/", "")
            self.last_grace = order.get("last_grace", LAST_GRACE)
            self.look_modules, self.look_every = order.get("look", []), order.get("look_every", 60.0)
            self.path = order.get("path", "")
            if order.get("code"):
                self.code, self.path = _unpack(order["code"])
            self.say("HostUp", facts={"pid": os.getpid(), "python": sys.executable, "version": sys.version.split()[0]})
        elif verb == "start":
            self._start(order)
        elif verb == "beat":
            self._send(b"B", b"")
        elif verb == "bye":
            self.last_grace = order.get("grace", self.last_grace)
            self.close("")
        elif task is None or order.get("attempt", task.attempt) != task.attempt:
            return  # it ended while the order was under way
        elif verb == "release":
            self._tell(task, {"kind": "Go"})
        elif verb == "conclude":
            self._tell(task, {"kind": "Over", "step": order["step"]})
        elif verb == "stop":
            self._stop(task, order["grace"])
        elif verb == "input" and task.inp >= 0:
            with contextlib.suppress(OSError):
                os.write(task.inp, base64.b64decode(order["data"]))
        elif verb == "size" and task.inp >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(task.inp, termios.TIOCSWINSZ, struct.pack("HHHH", order["rows"], order["columns"], 0, 0))

    def say(self, kind: str, task: Task | None = None, **more: Any) -> None:
        told: dict[str, Any] = {"kind": kind, **more}
        if task is not None:
            told.update(task=task.id, attempt=task.attempt)
        self._send(b"E", json.dumps(told).encode())

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self.wfd >= 0:
            self.outbox += HEADER.pack(kind, len(payload)) + payload
            self._write()

    def _write(self) -> None:
        try:
            while self.outbox:
                del self.outbox[: os.write(self.wfd, memoryview(self.outbox)[: 1 << 18].tobytes())]
        except BlockingIOError:
            return
        except OSError:  # the launcher is gone: end of file on the other pipe will say so, nobody is left to tell
            self.outbox.clear()
            self.wfd = -1

    # --- starting and ending tasks

    def _start(self, order: dict[str, Any]) -> None:
        task = Task(order)
        if self.closing is not None:
            return
        if task.attempt > 1:
            self._end_earlier(task)
        if task.port and (holder := port_holder(task.port)) is not None:
            self.say("PortTaken", task, port=task.port, pid=holder[0], holder=holder[1])
            self.say("Exited", task, code=98, error="port %d is held by %s" % (task.port, holder[1]))
            return
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in order.get("drop", ())}
        env.update(order["env"])
        env.update(MUSTER_RUN=self.run, MUSTER_ATTEMPT=str(task.attempt), MUSTER_FD=str(theirs.fileno()))
        if self.path:
            env["PYTHONPATH"] = os.pathsep.join(p for p in (self.path, env.get("PYTHONPATH", "")) if p)
        try:
            self._spawn(task, order, env, theirs.fileno())
        except (OSError, ValueError) as error:
            ours.close()
            said = "%s: %s" % (type(error).__name__, error)
            self.say("Spawned", task, pid=0)
            self.say("Exited", task, code=127, error=said, tail=said)
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        task.channel = ours
        self.tasks[task.id] = task
        self.selector.register(ours, selectors.EVENT_READ, ("report", task))
        self.selector.register(task.out, selectors.EVENT_READ, ("output", task))
        self._tell(task, {"kind": "Hello", **order.get("hello", {})})
        self.say("Spawned", task, pid=task.pid)

    def _spawn(self, task: Task, order: dict[str, Any], env: dict[str, str], channel: int) -> None:
        me, libc, tty = os.getpid(), self.libc, bool(order.get("tty"))

        def child() -> None:  # between fork and exec
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(126)
            for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGTTOU, signal.SIGTTIN):
                signal.signal(sig, signal.SIG_DFL)
            if tty:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        if tty:
            master, slave = os.openpty()
            task.inp = task.out = master
            read, write, stdin = master, slave, slave
        else:
            read, write = os.pipe()
            task.out, stdin = read, subprocess.DEVNULL
        os.set_blocking(read, False)
        try:
            task.proc = subprocess.Popen(
                order["argv"],
                env=env,
                cwd=os.path.expanduser(order.get("cwd") or "") or None,
                stdin=stdin,
                stdout=write,
                stderr=write,
                start_new_session=True,
                preexec_fn=child,
                pass_fds=(channel,),
            )
        except BaseException:  # whatever ended it: the pipe is not left open
            os.close(read)
            raise
        finally:
            os.close(write)

    def _stop(self, task: Task, grace: float) -> None:
        if grace <= 0:
            task.killed_at = task.killed_at or time.monotonic()  # asked again and again, it is given up all the same
            self._signal(task, signal.SIGKILL)
            return
        if task.kill_at is None:
            self._signal(task, signal.SIGTERM)
            self._signal(task, signal.SIGCONT)  # a frozen process acts on TERM only when it runs again
        task.kill_at = min(task.kill_at or float("inf"), time.monotonic() + grace)

    def _signal(self, task: Task, sig: int) -> None:
        if task.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(task.pid, sig)

    def close(self, why: str, lapsed: bool = False) -> None:
        """Ends all tasks; the loop ends once they are gone. ``lapsed``: the launcher may be there, but was silent."""
        if self.closing is not None:
            return
        self.closing = time.monotonic()
        self.lease = None
        if why:
            self.say("Closing", why=why, lapsed=lapsed)
        for task in self.tasks.values():
            self._stop(task, self.last_grace)

    # --- what happened

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            task = next((t for t in self.tasks.values() if t.pid == pid), None)
            if task is None:
                continue  # a stray that we had adopted
            if os.WIFSTOPPED(status):
                self.say("Frozen", task)
            elif os.WIFCONTINUED(status):
                self.say("Thawed", task)
            else:
                task.code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                assert task.proc is not None
                task.proc.returncode = task.code
                self._ended(task)

    def _ended(self, task: Task) -> None:
        swept = self._sweep(task)
        self._read_reports(task)
        for _ in range(256):  # at most 16 MB that were still in the pipe: its last words, however far the launcher is
            if not self._read_output(task, beyond=True):
                break
        self._forget(task)
        del self.tasks[task.id]
        tail = task.tail.decode("utf-8", "replace")
        trace, error = last_traceback(tail)
        code = task.code if task.code is not None else 1
        oom = False
        if code == -signal.SIGKILL:
            now = _oom_kills()
            oom, self.ooms = now > self.ooms, now
        if code and not swept and not task.listening:
            self._look_for_holder(task)  # it may have failed to bind its port before we had looked at it
        self.say(
            "Exited",
            task,
            code=code,
            error=error if code else "",
            trace=trace if code else "",
            tail="\n".join(tail.splitlines()[-12:])[-2000:] if code else "",
            swept=swept,
            oom=oom,
        )

    def _forget(self, task: Task) -> None:
        for fd in (task.out, task.channel):
            with contextlib.suppress(KeyError, ValueError):
                if fd is not None:
                    self.selector.unregister(fd)
        with contextlib.suppress(OSError):
            os.close(task.out)
        if task.channel:
            task.channel.close()

    def _read_output(self, task: Task, beyond: bool = False) -> bool:
        if len(self.outbox) > BACKLOG and not beyond:
            time.sleep(0.005)  # the launcher is slow or frozen: let the task wait, not our memory grow
            return False
        try:
            got = os.read(task.out, 1 << 16)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:  # EIO: the last holder of the terminal is gone
                raise
            got = b""
        if not got:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(task.out)
            return False
        if task.gpus and not task.no_cuda:
            task.no_cuda = _line_with(NO_CUDA, bytes(task.tail[-200:]) + got)
        task.tail += got
        if len(task.tail) > 2 * TAIL:
            del task.tail[:-TAIL]
        self._send(b"O", task.id.encode() + b"\0" + str(task.attempt).encode() + b"\0" + got)
        return True

    def _read_reports(self, task: Task) -> None:
        assert task.channel is not None
        while True:
            try:
                got = task.channel.recv(1 << 16)
            except (BlockingIOError, ValueError):
                return
            except ConnectionResetError:
                continue  # it died with a line of ours unread; what it had said before is still there
            except OSError:
                got = b""
            if not got:
                with contextlib.suppress(KeyError, ValueError):
                    self.selector.unregister(task.channel)
                return
            *lines, task.heard = (task.heard + got).split(b"\n")
            task.heard = task.heard[-REPORT_LINE:]
            for line in lines:
                self._pass_on(task, line)

    def _pass_on(self, task: Task, line: bytes) -> None:
        try:
            told = json.loads(line)
            kind = told.pop("kind")
        except (ValueError, KeyError, AttributeError, TypeError):
            return  # the user's code wrote into the descriptor: not a report, and not worth ending a run
        for name in ("at", "task", "attempt"):
            told.pop(name, None)
        told.update(kind=str(kind), task=task.id, attempt=task.attempt)
        self._send(b"R", json.dumps(told).encode())

    def _tell(self, task: Task, told: dict[str, Any]) -> None:
        if task.channel:
            with contextlib.suppress(OSError):
                task.channel.sendall(json.dumps(told).encode() + b"\n")

    def _look_at_ports(self) -> None:
        waiting = [t for t in self.tasks.values() if t.port and not t.listening]
        if not waiting:
            return
        inodes = listening_inodes({t.port for t in waiting})
        for task in waiting:
            if not (mine := inodes.get(task.port)):
                continue
            if any(_holds(pid, mine) for pid in [*_session(task.pid), *self._carrying(task)]):
                task.listening = True
                self.say("Listening", task, port=task.port)
            else:
                self._look_for_holder(task)

    def _carrying(self, task: Task) -> list[int]:
        """Processes below us that carry the task's name, whatever session they have made for themselves."""
        mark = ("MUSTER_TASK=%s" % task.id).encode()
        return [pid for pid in _below(os.getpid(), set()) if mark in _environ(pid)]

    def _look_for_holder(self, task: Task) -> None:
        if task.port and not task.taken and (holder := port_holder(task.port)) is not None:
            task.taken = True
            self.say("PortTaken", task, port=task.port, pid=holder[0], holder=holder[1])

    # --- the GPUs

    def _look_at_gpus(self, now: float) -> None:
        """Starts a look where one is due: a task has run for a while, and was not yet seen on all of its GPUs."""
        if self.look is not None:
            if now >= self.look.until:
                self.look.give_up()  # its pipe ends with it; where not even KILL helps, there is no other look
            return
        if not self.look_modules or self.closing is not None or now < self.looked_at + self.look_every:
            return
        due = {t.id for t in self.tasks.values() if now >= t.born + self.look_every and _wanting(t)}
        if not due:
            return
        self.looked_at = now
        tasks = {t.id: {"pid": t.pid, "gpus": t.gpus, "asked": t.id in due} for t in self.tasks.values()}
        with contextlib.suppress(OSError):  # no process, no descriptor to be had: the next time will do
            self.look = Look(self.look_modules, tasks, {t.id: t.attempt for t in self.tasks.values()})
            self.selector.register(self.look.out, selectors.EVENT_READ, ("look", self.look))

    def _read_look(self, look: Look) -> None:
        if look.read():
            return
        self.selector.unregister(look.out)
        look.close()
        self.look = None
        try:
            found = json.loads(look.heard.decode())
        except ValueError:  # it was given up, or the host is too broken to look: then nobody can tell
            return
        if not found:
            self.look_modules = []  # no driver here
        for name, told in found.items():
            task = self.tasks.get(name)
            if task is None or task.attempt != look.attempts[name] or not told["used"]:
                continue  # it is over, or the driver does not say
            news = task.used is None or _without_numbers(told) != _without_numbers(task.used)
            task.used = told
            if news:
                self.say("GpuUse", task, no_cuda=task.no_cuda, **told)

    # --- leaving nothing behind

    def _give_up(self, task: Task) -> None:
        """KILL did not end it: it waits inside the kernel (state D: a dead disk or network folder). We do not."""
        with contextlib.suppress(OSError):
            if _stat(task.pid)[0] != "Z":
                said = "pid %d does not die of KILL (state %s): it waits inside the kernel" % (
                    task.pid,
                    _stat(task.pid)[0],
                )
                self._forget(task)
                del self.tasks[task.id]
                self.say("Exited", task, code=-int(signal.SIGKILL), error=said, trace=said)

    def _sweep(self, task: Task) -> int:
        """Ends what ``task`` left behind: its process group, and whatever else below us carries its name."""
        mark = ("MUSTER_TASK=%s" % task.id).encode()
        living = {t.pid for t in self.tasks.values() if t.code is None}
        strays = [pid for pid in _below(os.getpid(), living) if mark in _environ(pid)]
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return len(strays)

    def _end_earlier(self, task: Task) -> None:
        run, name = ("MUSTER_RUN=%s" % self.run).encode(), ("MUSTER_TASK=%s" % task.id).encode()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            ours = [pid for pid, state, _, _ in _everyone() if state != "Z" and {run, name} <= set(_environ(pid))]
            if not ours:
                return
            for pid in ours:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _sweep_all(self) -> None:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            left = list(_below(os.getpid(), set()))
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)
        if self.scratch:  # sockets of parameter servers that were killed
            place = "/tmp/muster-%d-%s" % (os.getuid(), self.scratch)
            if not os.path.islink(place):
                shutil.rmtree(place, ignore_errors=True)

    def _flush_at_last(self) -> None:
        until = time.monotonic() + 2.0
        while self.outbox and self.wfd >= 0 and time.monotonic() < until:
            self._write()
            time.sleep(0.005)


class Look:
    """A process that asks the driver who uses the GPUs. Its input is a file, which takes all of it at once."""

    def __init__(self, modules: list[Any], tasks: dict[str, Any], attempts: dict[str, int]) -> None:
        self.attempts = attempts
        self.until = time.monotonic() + LOOK_LIMIT
        self.heard = b""
        with tempfile.TemporaryFile() as request:
            request.write(json.dumps({"modules": modules, "request": {"tasks": tasks}}).encode())
            request.seek(0)
            self.proc = subprocess.Popen(
                [sys.executable, "-I", "-c", LOOK],
                stdin=request,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
            )
        assert self.proc.stdout
        self.out = self.proc.stdout.fileno()
        os.set_blocking(self.out, False)

    def read(self) -> bool:
        """Whether there may be more to come."""
        try:
            got = os.read(self.out, 1 << 16)
        except BlockingIOError:
            return True
        self.heard += got
        return bool(got)

    def give_up(self) -> None:
        self.until = float("inf")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.proc.pid, signal.SIGKILL)

    def close(self) -> None:
        self.proc.returncode = 0  # it is reaped with all the others
        assert self.proc.stdout
        self.proc.stdout.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wanting(task: Task) -> bool:
    """It was given GPUs, and is not known to use each of them."""
    used = task.used["used"] if task.used else {}
    return bool(task.gpus) and not all(used.get(str(gpu)) for gpu in task.gpus)


def _without_numbers(told: dict[str, Any]) -> dict[str, Any]:
    """Memory comes and goes, and is no news; that a GPU is used, or by whom, is."""
    return {**told, "used": {gpu: bool(used) for gpu, used in told["used"].items()}}


def _line_with(signs: tuple[bytes, ...], text: bytes) -> str:
    """The first line of ``text`` that has one of ``signs``, or nothing."""
    for sign in signs:
        at = text.find(sign)
        if at >= 0:
            line = text[text.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
            return line.decode("utf-8", "replace").strip()[-300:]
    return ""


# --- reading /proc


def _stat(pid: int) -> tuple[str, int, int]:
    """State letter, parent and session of a process. Raises OSError if it is gone."""
    with open("/proc/%d/stat" % pid, "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1]), int(fields[3])


def _everyone() -> Iterator[tuple[int, str, int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                yield (int(name), *_stat(int(name)))


def _below(top: int, without: set[int]) -> list[int]:
    """All living descendants of ``top``, leaving out the trees of ``without``."""
    children: dict[int, list[int]] = {}
    for pid, state, parent, _ in _everyone():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found, todo = [], [top]
    while todo:
        for pid in children.get(todo.pop(), []):
            if pid not in without:
                found.append(pid)
                todo.append(pid)
    return found


def _session(sid: int) -> list[int]:
    return [sid, *(pid for pid, state, _, session in _everyone() if session == sid and pid != sid and state != "Z")]


def _environ(pid: int) -> list[bytes]:
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def listening_inodes(ports: set[int]) -> dict[int, set[str]]:
    """The socket inodes that listen on each of ``ports`` on this machine."""
    found: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = file.readlines()[1:]
        except OSError:
            continue
        for row in rows:
            parts = row.split()
            if parts[3] == "0A" and (port := int(parts[1].rpartition(":")[2], 16)) in ports:
                found.setdefault(port, set()).add(parts[9])
    return found


def _holds(pid: int, inodes: set[str]) -> bool:
    try:
        names = os.listdir("/proc/%d/fd" % pid)
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            link = os.readlink("/proc/%d/fd/%s" % (pid, name))
            if link.startswith("socket:[") and link[8:-1] in inodes:
                return True
    return False


def port_holder(port: int) -> tuple[int, str] | None:
    """(pid, who it is in words) of what listens on ``port`` here, or None if nothing does."""
    inodes = listening_inodes({port}).get(port)
    if not inodes:
        return None
    for pid, _, _, _ in _everyone():
        if _holds(pid, inodes):
            return pid, who_is(pid)
    return 0, "a process of another user"


def who_is(pid: int) -> str:
    """pid, user and command of a process, and the run and task that it belongs to, if it is one of Muster's."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            command = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return "pid %d" % pid
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    marks = dict(part.split(b"=", 1) for part in _environ(pid) if part.startswith(b"MUSTER_") and b"=" in part)
    said = "pid %d (%s, user %s)" % (pid, command[:80] or "no command", user)
    if b"MUSTER_RUN" in marks:
        run, task = marks[b"MUSTER_RUN"].decode(), marks.get(b"MUSTER_TASK", b"?").decode()
        said += ", which is %s of run %s: muster stop %s" % (task, run, run)
    return said


def _oom_kills() -> int:
    try:
        with open("/proc/vmstat") as file:
            return next((int(row.split()[1]) for row in file if row.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def last_traceback(text: str) -> tuple[str, str]:
    """(the last Python traceback in ``text``, its last line), or two empty strings."""
    at = text.rfind("Traceback (most recent call last):")
    if at < 0:
        return "", ""
    lines = text[at:].splitlines()
    kept = [lines[0]]
    for line in lines[1:]:
        kept.append(line)
        if line and not line.startswith((" ", "\t")):
            break
    return "\n".join(kept), kept[-1].strip() if len(kept) > 1 else ""


def _unpack(code: str) -> tuple[IO[bytes], str]:
    """The zip of the task-side code as a file without a name, and the path by which our tasks, and what they start, can
    open it while we live. However we end, nothing of it stays on the disk."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as we do)
    file.write(base64.b64decode(code))
    file.flush()
    return file, "/proc/%d/fd/%d" % (os.getpid(), file.fileno())


def main() -> None:
    wfd = os.dup(1)
    rfd = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    for fd in (rfd, wfd):
        os.set_inheritable(fd, False)
    try:
        Agent(rfd, wfd).serve()
    except Exception:  # the launcher sees the end of the pipe; what is left here is for its log (stderr)
        traceback.print_exc()
        for pid in _below(os.getpid(), set()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        sys.exit(70)


if __name__ == "__main__":
    main()
