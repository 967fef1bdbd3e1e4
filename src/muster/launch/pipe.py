"""A pipe to the agent on one host, and the launcher over any number of such pipes.

A launcher is only "how to get a pipe to host X": ``AgentLauncher`` is given that as a function, and is the same for
this machine and for machines behind ssh.
"""

import base64
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import msgspec

from muster.cluster import Host
from muster.events import REPORTS, Event, Exited, HostLost, HostUp, StopAsked, Warned, parse
from muster.launch import Output, gpu_use
from muster.launch.agent import HEADER, LENGTH, MARK
from muster.plan import Task
from muster.ps.scratch import folder

MAX_UP = 16 << 20
BEAT, SILENCE = 1.0, 5.0  # seconds between heartbeats, and after which a host that answers none is spoken of
LOST = 8.0  # seconds after which it is lost: TCP, after a cut of 3 s, may need 6.5 s until it tries again
PUSH_EVERY = 0.02  # seconds between tries to write to a pipe that is full
DIALLED = float("inf")  # a host that has been dialled is due again once that has failed, not before
AT_ONCE, TRIES = 8, 5  # logins under way at one moment, and how often one that found its sshd too busy is repeated
BUSY = re.compile(r"kex_exchange_identification|Connection (reset|closed) by|ssh_exchange_identification")


class HostsUnreached(Exception):
    """Some agents did not answer: what ssh said, and its exit code (None: it still waited), by host."""

    def __init__(self, failures: dict[str, tuple[str, int | None]]) -> None:
        super().__init__(", ".join(failures))
        self.failures = failures


class Doorbell(Protocol):
    """Something else that can wake a launcher: signals of the terminal, keys."""

    def fileno(self) -> int: ...
    def take(self, now: float) -> list[Event]: ...


@dataclass(frozen=True)
class Connection:
    """A process whose stdin and stdout lead to an agent; what to send it first; where its stderr is kept, if it is."""

    process: "subprocess.Popen[bytes]"
    preamble: bytes = b""
    said: IO[bytes] | None = None


class AgentPipe:
    """Frames to and from one agent process. Nothing here ever blocks: what the pipe does not take is kept."""

    def __init__(self, host: str, connection: Connection) -> None:
        self.host, self.process, self._said = host, connection.process, connection.said
        assert self.process.stdin and self.process.stdout
        self.fd = self.process.stdout.fileno()
        self.into = self.process.stdin.fileno()
        for fd in (self.fd, self.into):
            os.set_blocking(fd, False)
        self._outbox = bytearray(connection.preamble)
        self.up = False  # its agent has answered
        self._inbox = bytearray()
        self._marked = False
        self.noise = b""  # what was printed before the agent's mark: a login shell's, worth showing on failure
        self.open = True
        self.ended = False  # all that the agent has ever said was read
        self.why = ""  # it has ended
        self.doubted = False  # its silence was spoken of
        self.silent = False  # it was given up
        self.asked: float | None = None  # since when a heartbeat waits for anything to be heard

    def send(self, **order: Any) -> None:
        payload = json.dumps(order).encode()
        if self.open:
            self._outbox += LENGTH.pack(len(payload)) + payload
            self.push()

    def push(self) -> None:
        """Writes what waits, as far as the pipe takes it."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.into, memoryview(self._outbox)[: 1 << 18].tobytes())]
        except BlockingIOError:
            return
        except OSError:  # the far end is gone: the end of its output says so
            self.open = False
            self._outbox.clear()

    @property
    def waiting(self) -> bool:
        return bool(self._outbox) and self.open

    def complaint(self) -> str:
        """What ssh, or the login shell, said on stderr and before the agent's mark."""
        text = self.noise
        if self._said is not None and not self._said.closed:
            self._said.seek(0)
            text = self._said.read()[-4096:] or text
        return text.decode("utf-8", "replace").strip()

    def code(self) -> int | None:
        """The exit code of the process, which is known a moment after its output has ended; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(1.0 if self.ended else 0.0)
        return None

    def give_up(self) -> None:
        """No goodbye: ssh, and what it started to get through, would wait for a dead machine for minutes."""
        self.open, self.ended, self.silent = False, True, True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def shut(self) -> None:
        """No more orders: the agent sees the end of its lease."""
        self.open = False
        with contextlib.suppress(OSError):
            assert self.process.stdin
            self.process.stdin.close()

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Complete frames (type, payload) that have come, or None at the end of the pipe."""
        ended = False
        for _ in range(16):
            try:
                got = os.read(self.fd, 1 << 18)
            except BlockingIOError:
                break
            if not got:
                ended = True
                break
            self._inbox += got
            self.asked, self.doubted = None, False
        if not self._marked:
            head, mark, rest = bytes(self._inbox).partition(MARK)
            if not mark:
                self.noise = head[-4096:]
                return None if ended else []
            self.noise, self._inbox, self._marked = head[-4096:], bytearray(rest), True
        frames = list(self._frames())
        return None if ended and not frames else frames

    def _frames(self) -> "list[tuple[bytes, bytes]]":
        found, at, view = [], 0, bytes(self._inbox)
        while len(view) - at >= HEADER.size:
            kind, size = HEADER.unpack_from(view, at)
            if size > MAX_UP:
                raise ValueError(f"the agent on {self.host} sent a frame of {size} bytes")
            if len(view) - at - HEADER.size < size:
                break
            found.append((kind, view[at + HEADER.size : at + HEADER.size + size]))
            at += HEADER.size + size
        del self._inbox[:at]
        return found


class AgentLauncher:
    """Runs tasks through one agent a host. ``connect`` gives the process whose stdin and stdout lead to the agent."""

    def __init__(
        self,
        hosts: Sequence[Host],
        connect: Callable[[Host], Connection],
        *,
        run: str,
        code: bytes = b"",
        path: str = "",
        hello: Callable[[Task], dict[str, Any]] = lambda task: {},
        lease: float | None = None,
        last_grace: float = 1.0,
        drop: Sequence[str] = (),
        foreground: str = "",
        doorbells: Sequence[Doorbell] = (),
        one_for_all: bool = False,
        remote: bool = False,
        gpu_idle: float = 0.0,
        may_dial: Callable[[str, Sequence[str]], bool] = lambda host, under_way: True,
    ) -> None:
        """``hello``: what a task is told first, down its own pipe and nowhere else: keys.

        ``gpu_idle``: seconds between looks at who uses the GPUs that tasks were given, and before the first; 0: none.

        ``one_for_all``: the hosts are names of one machine, so the first pipe serves the tasks of all.

        ``may_dial``: whether there is room for a login to a host beside those under way (``jumps.room``).

        ``remote``: connecting may take long and fail, so ``open()`` is called by whoever can tell of it.
        """
        self._zero = time.monotonic()
        self._pipes: dict[str, AgentPipe] = {}
        self._selector = selectors.DefaultSelector()
        self._attempts: dict[str, int] = {}
        self._alive: dict[str, AgentPipe] = {}
        self._drop, self._foreground, self._run = list(drop), foreground, run
        self._last_beat, self._beat = 0.0, min(BEAT, lease / 4) if lease else None
        self._reasons: dict[str, str] = {}  # why an agent has ended its tasks, by host
        self._one = hosts[0].name if one_for_all else ""
        for bell in doorbells:
            self._selector.register(bell, selectors.EVENT_READ, bell)
        self._hello_to = hello
        self._hosts, self._connect = {host.name: host for host in hosts}, connect
        self._may_dial = may_dial
        self._hello = {
            "verb": "hello",
            "run": run,
            "lease": lease,
            "scratch": folder(run).name.split("-", 2)[2],
            "last_grace": last_grace,
            "path": path,
            "code": base64.b64encode(code).decode() if code else "",
            "look": gpu_use.modules() if gpu_idle else [],
            "look_every": gpu_idle,
        }
        self._early: list[Event] = []  # what was heard while connecting, for the first wait
        if not remote:
            self._early = self.open()

    def open(self, within: float = 30.0) -> list[Event]:
        """Connects to every host at once and returns what they said; at once if the run is to end before it began.

        Raises HostsUnreached, leaving nothing.
        """
        due, tried = dict.fromkeys(self._hosts, 0.0), dict.fromkeys(self._hosts, 0)
        failed: dict[str, AgentPipe] = {}
        news: list[Event] = []
        room, until = AT_ONCE, self.now() + within
        try:
            while due and self.now() < until:
                self._dial_some(due, room)
                for event in self.wait(self.now() + 0.05):
                    if isinstance(event, HostUp):
                        due.pop(event.host, None)
                        until = self.now() + within  # as long as any come, the others are waited for
                    if isinstance(event, Event) and not isinstance(event, HostLost):
                        news.append(event)
                if any(isinstance(event, StopAsked) for event in news):
                    return news
                for name in [name for name in due if due[name] == DIALLED and self._pipes[name].ended]:
                    tried[name] += 1
                    if tried[name] > TRIES or not BUSY.search(self._pipes[name].complaint()):
                        failed[name] = self._pipes[name]
                        del due[name]
                    else:  # as many as are let in just now, and no more
                        room = max(1, min(room, len(self._under_way(due))))
                        due[name] = self.now() + 0.25 * 2.0 ** tried[name]
            failed |= {name: self._pipes[name] for name in due if name in self._pipes}
            if failed:
                raise HostsUnreached({n: (p.complaint(), p.code()) for n, p in failed.items()})
            return news
        except BaseException:  # Ctrl-C too: connections that were made are not left open
            self.close()
            raise

    def _under_way(self, due: dict[str, float]) -> list[str]:
        return [name for name in due if name in self._pipes and not self._pipes[name].ended]

    def _dial_some(self, due: dict[str, float], room: int) -> None:
        """Dials hosts whose time has come, a few at one moment: an sshd, or a jump host, refuses a crowd."""
        under_way = self._under_way(due)
        waiting = [name for name in due if name not in under_way and due[name] <= self.now()]
        for name in waiting:
            if len(under_way) < room and self._may_dial(name, under_way):
                due[name] = DIALLED
                under_way.append(name)
                self._dial(self._hosts[name])

    def _dial(self, host: Host) -> AgentPipe:
        pipe = AgentPipe(host.name, self._connect(host))
        self._pipes[host.name] = pipe
        self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)
        pipe.send(**self._hello)
        return pipe

    def now(self) -> float:
        return time.monotonic() - self._zero

    def start(self, task: Task, attempt: int) -> None:
        if (pipe := self._pipe(task)).ended:
            self._dial(self._hosts[pipe.host])  # its host was lost; if it is back, so is the task
        self._attempts[task.id] = attempt
        self._alive[task.id] = self._pipe(task)
        self._pipe(task).send(
            verb="start",
            task=task.id,
            attempt=attempt,
            argv=list(task.argv),
            env=task.env,
            cwd=task.cwd,
            port=task.bound.port if task.listens else 0,
            drop=self._drop,
            tty=task.id == self._foreground,
            hello=self._hello_to(task),
            gpus=list(task.gpus),
        )

    def release(self, task: Task) -> None:
        self._send(task, verb="release")

    def conclude(self, task: Task, step: int) -> None:
        self._send(task, verb="conclude", step=step)

    def stop(self, task: Task, grace: float) -> None:
        self._send(task, verb="stop", grace=grace)

    def type(self, task: Task, data: bytes) -> None:
        """Gives key strokes to the task that has the foreground terminal."""
        self._send(task, verb="input", data=base64.b64encode(data).decode())

    def resize(self, task: Task, rows: int, columns: int) -> None:
        self._send(task, verb="size", rows=rows, columns=columns)

    def _pipe(self, task: Task) -> AgentPipe:
        return self._pipes[self._one or task.host]

    def _send(self, task: Task, **order: Any) -> None:
        self._pipe(task).send(task=task.id, attempt=self._attempts.get(task.id, 0), **order)

    def wait(self, until: float) -> list[Event | Output]:
        looked = self.now()
        self._heartbeat()
        news: list[Event | Output] = [*self._early, *self._lost()]
        self._early = []
        limit = until if self._beat is None else min(until, self._last_beat + self._beat)
        limit = 0.0 if news else limit
        if self._push():
            limit = min(limit, self.now() + PUSH_EVERY)
        for key, _ in self._selector.select(max(0.0, limit - self.now())):
            if isinstance(key.data, AgentPipe):
                news += self._from_agent(key.data)
            else:
                news += key.data.take(self.now())
        return news + self._silent(looked)

    def _push(self) -> bool:
        """Whether orders still wait for room in a pipe."""
        for pipe in self._pipes.values():
            if pipe.waiting:
                pipe.push()
        return any(pipe.waiting for pipe in self._pipes.values())

    def _lost(self) -> Iterator[Exited]:
        """Tasks whose agent is gone: it ends them before it goes, and nobody is left to say how."""
        for name, pipe in list(self._alive.items()):
            if pipe.ended:
                del self._alive[name]
                said = f"the agent on {pipe.host} is gone: {pipe.why}"
                away = pipe.silent or not pipe.up  # an agent that was killed, or a reset, says nothing of its host
                yield Exited(self.now(), name, self._attempts[name], -signal.SIGHUP, error=said, lost=away)

    def _silent(self, looked: float) -> list[Event]:
        """Hosts that answer no heartbeat. ``looked``: a moment since when all that had come by then was read, so that a
        launcher which was itself frozen meanwhile blames nobody."""
        found: list[Event] = []
        for pipe in self._pipes.values():
            if pipe.asked is None or pipe.ended or looked - pipe.asked <= SILENCE:
                continue
            if looked - pipe.asked > LOST:
                self._selector.unregister(pipe.fd)
                pipe.give_up()
                pipe.why = f"it has not answered for {LOST:g} s"
                found.append(HostLost(self.now(), pipe.host, pipe.why))
            elif not pipe.doubted:
                pipe.doubted = True
                found.append(Warned(self.now(), f"{pipe.host} has not answered for {SILENCE:g} s"))
        return found

    def _heartbeat(self) -> None:
        if self._beat is not None and self.now() - self._last_beat >= self._beat:
            self._last_beat = self.now()
            for pipe in self._pipes.values():
                pipe.send(verb="beat")
                if pipe.up and pipe.asked is None:
                    pipe.asked = self._last_beat

    def _from_agent(self, pipe: AgentPipe) -> list[Event | Output]:
        frames = pipe.receive()
        now = self.now()
        if frames is None:
            self._selector.unregister(pipe.fd)
            pipe.open, pipe.ended = False, True
            said = self._reasons.pop(pipe.host, "") or pipe.complaint()
            pipe.why = said.splitlines()[-1] if said else "its agent ended"
            return [HostLost(now, pipe.host, pipe.why)]
        news: list[Event | Output] = []
        for kind, payload in frames:
            if kind == b"O":
                task, attempt, data = payload.split(b"\0", 2)
                news.append(Output(task.decode(), int(attempt), data))
            elif kind != b"B":
                with contextlib.suppress(ValueError):  # a report of the user's own making, of no kind that we know
                    told = json.loads(payload)
                    news.append(self._event(pipe, told, now) if kind == b"E" else _report(told, now))
        return news

    def _event(self, pipe: AgentPipe, told: dict[str, Any], now: float) -> Event:
        """What the agent itself says. Raises ValueError for what is no event yet."""
        if told["kind"] == "HostUp":
            pipe.up = True
            return HostUp(now, pipe.host, told["facts"])
        if told["kind"] == "Closing":
            self._reasons[pipe.host] = told["why"]
            if told.get("lapsed"):  # and we hear of it, so it was we who were away
                return StopAsked(now, "lease")
            raise ValueError("told again as HostLost, at the end of the pipe")
        event = _stamped(told, now)
        if isinstance(event, Exited):
            self._alive.pop(event.task, None)
        return event

    def close(self) -> None:
        for pipe in self._pipes.values():
            if pipe.up:
                pipe.send(verb="bye")
            else:
                pipe.give_up()  # it still waits for a machine that may be dead; an agent there sees the end of the pipe
        until = time.monotonic() + 2.0
        while self._push() and time.monotonic() < until:
            time.sleep(0.005)
        for pipe in self._pipes.values():
            pipe.shut()
        until = time.monotonic() + 10.0
        for pipe in self._pipes.values():
            self._drain(pipe, until)
        self._selector.close()

    def _drain(self, pipe: AgentPipe, until: float) -> None:
        """Reads what the agent still says, so that it never waits for us, until it has ended."""
        while time.monotonic() < until and pipe.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                pipe.receive()
            time.sleep(0.005)
        if pipe.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                pipe.process.send_signal(signal.SIGKILL)
        pipe.process.wait()
        assert pipe.process.stdout
        pipe.process.stdout.close()


def _report(told: dict[str, Any], now: float) -> Event:
    """What a task says of itself. Raises ValueError for anything that is not for a task to say."""
    event = _stamped(told, now)
    if not isinstance(event, REPORTS):
        raise ValueError(f"no report: {told}")
    return event


def _stamped(told: dict[str, Any], now: float) -> Event:
    said = parse(json.dumps({**told, "at": round(now, 4)}))
    return msgspec.convert(said.__dict__, type(said))  # a task may report text where a number belongs
