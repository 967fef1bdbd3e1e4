"""A pipe to the agent on one host, and the launcher over any number of such pipes.

A launcher is only "how to get a pipe to host X": ``AgentLauncher`` is given that as a function, and is the same for
this machine and for machines behind ssh.
"""

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from muster.cluster import Host
from muster.events import REPORTS, Event, Exited, HostLost, HostUp, parse
from muster.launch import Output
from muster.launch.agent import HEADER, LENGTH, MARK
from muster.plan import Task

MAX_UP = 16 << 20


class Doorbell(Protocol):
    """Something else that can wake a launcher: signals of the terminal, keys."""

    def fileno(self) -> int: ...
    def take(self, now: float) -> list[Event]: ...


class AgentPipe:
    """Frames to and from one agent process."""

    def __init__(self, host: str, process: "subprocess.Popen[bytes]") -> None:
        self.host, self.process = host, process
        assert process.stdin and process.stdout
        self.fd = process.stdout.fileno()
        os.set_blocking(self.fd, False)
        self._inbox = bytearray()
        self._marked = False
        self.noise = b""  # what was printed before the agent's mark: a login shell's, worth showing on failure
        self.open = True
        self.ended = False  # all that the agent has ever said was read

    def send(self, **order: Any) -> None:
        payload = json.dumps(order).encode()
        assert self.process.stdin
        try:
            self.process.stdin.write(LENGTH.pack(len(payload)) + payload)
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            self.open = False

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
        connect: Callable[[Host], "subprocess.Popen[bytes]"],
        *,
        run: str,
        code: bytes = b"",
        path: str = "",
        secret: str | None = None,
        lease: float | None = None,
        last_grace: float = 1.0,
        drop: Sequence[str] = (),
        foreground: str = "",
        doorbells: Sequence[Doorbell] = (),
        one_for_all: bool = False,
    ) -> None:
        """``one_for_all``: the hosts are names of one machine, so the first pipe serves the tasks of all."""
        self._zero = time.monotonic()
        self._pipes: dict[str, AgentPipe] = {}
        self._selector = selectors.DefaultSelector()
        self._attempts: dict[str, int] = {}
        self._alive: dict[str, AgentPipe] = {}
        self._drop, self._foreground, self._run = list(drop), foreground, run
        self._last_beat, self._beat = 0.0, lease / 4 if lease else None
        self._one = hosts[0].name if one_for_all else ""
        for bell in doorbells:
            self._selector.register(bell, selectors.EVENT_READ, bell)
        hello = {
            "verb": "hello",
            "run": run,
            "lease": lease,
            "secret": secret,
            "last_grace": last_grace,
            "path": path,
            "code": base64.b64encode(code).decode() if code else "",
        }
        try:
            for host in hosts:
                pipe = AgentPipe(host.name, connect(host))
                self._pipes[host.name] = pipe
                self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)
                pipe.send(**hello)
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        return time.monotonic() - self._zero

    def start(self, task: Task, attempt: int) -> None:
        self._attempts[task.id] = attempt
        self._alive[task.id] = self._pipe(task)
        self._pipe(task).send(
            verb="start",
            task=task.id,
            attempt=attempt,
            argv=list(task.argv),
            env=task.env,
            cwd=task.cwd,
            port=task.port if task.listens else 0,
            drop=self._drop,
            tty=task.id == self._foreground,
        )

    def release(self, task: Task) -> None:
        self._send(task, verb="release")

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
        self._heartbeat()
        news: list[Event | Output] = list(self._lost())
        limit = until if self._beat is None else min(until, self._last_beat + self._beat)
        limit = 0.0 if news else limit
        for key, _ in self._selector.select(max(0.0, limit - self.now())):
            if isinstance(key.data, AgentPipe):
                news += self._from_agent(key.data)
            else:
                news += key.data.take(self.now())
        return news

    def _lost(self) -> Iterator[Exited]:
        """Tasks whose agent is gone: it ends them before it goes, and nobody is left to say how."""
        for name, pipe in list(self._alive.items()):
            if pipe.ended:
                del self._alive[name]
                said = f"the agent on {pipe.host} is gone"
                yield Exited(self.now(), name, self._attempts[name], -signal.SIGHUP, error=said, trace=said)

    def _heartbeat(self) -> None:
        if self._beat is not None and self.now() - self._last_beat >= self._beat:
            self._last_beat = self.now()
            for pipe in self._pipes.values():
                pipe.send(verb="beat")

    def _from_agent(self, pipe: AgentPipe) -> list[Event | Output]:
        frames = pipe.receive()
        now = self.now()
        if frames is None:
            self._selector.unregister(pipe.fd)
            pipe.open, pipe.ended = False, True
            noise = pipe.noise.decode("utf-8", "replace").strip()
            return [HostLost(now, pipe.host, noise.splitlines()[-1] if noise else "its agent ended")]
        news: list[Event | Output] = []
        for kind, payload in frames:
            if kind == b"O":
                task, attempt, data = payload.split(b"\0", 2)
                news.append(Output(task.decode(), int(attempt), data))
            else:
                with contextlib.suppress(ValueError):  # a report of the user's own making, of no kind that we know
                    event = self._event(pipe, payload, now)
                    news += [event] if kind == b"E" or isinstance(event, REPORTS) else []
        return news

    def _event(self, pipe: AgentPipe, payload: bytes, now: float) -> Event:
        told = json.loads(payload)
        if told["kind"] == "HostUp":
            return HostUp(now, pipe.host, told["facts"])
        said = parse(json.dumps({**told, "at": round(now, 4)}))
        event = msgspec.convert(said.__dict__, type(said))  # a task may report text where a number belongs
        if isinstance(event, Exited):
            self._alive.pop(event.task, None)
        return event

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(verb="bye")
            with contextlib.suppress(OSError, AttributeError):
                assert pipe.process.stdin
                pipe.process.stdin.close()
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
