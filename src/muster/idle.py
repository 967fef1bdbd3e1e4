"""A GPU that was given to a task and is not used, with the likeliest reason. Pure: state, time and plan in, rows out.

TensorFlow says in one line among many that it goes on without a GPU, and then trains, twenty times slower. A task is
not blamed for a GPU that it has not come to yet: only once it makes steps, or has had three times ``gpu_idle``; an
evaluator only once it has done a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.events import GpuUse
from muster.plan import Plan, Task
from muster.state import ALIVE, State, TaskState

CHECK = "muster check, which says what TensorFlow there lacks"


@dataclass(frozen=True)
class Idle:
    task: str
    host: str
    gpus: tuple[str, ...]
    since: float  # seconds since the run began: when this attempt did
    lasted: float
    why: str
    try_: str

    def text(self) -> str:
        """One sentence: which task, where, which GPU, since when, most likely why, and what to try."""
        which = f"GPU {self.gpus[0]}" if len(self.gpus) == 1 else f"GPUs {', '.join(self.gpus)}"
        return (
            f"{self.task} on {self.host} does not use {which}, which it was given: not once in {self.lasted:.0f} s, "
            f"since it started. Most likely {self.why}. Try: {self.try_}"
        )


def idle(state: State, now: float, plan: Plan) -> list[Idle]:
    """Every task with a GPU of its own that the last look found idle; for one that has ended, it lasted to the end."""
    found = []
    for name, t in state.tasks.items():
        if plan.tasks[name].role == "evaluator" and (t.checkpoint or not t.evaluations):
            continue
        gpus = tuple(gpu for gpu, used in t.gpus.used.items() if not used) if t.gpus else ()
        lasted = (now if t.phase in ALIVE else t.since) - t.started
        if t.gpus and gpus and (t.step >= 0 or lasted >= 3 * plan.run.gpu_idle):
            why, try_ = _why(t.gpus, plan.tasks[name], t)
            found.append(Idle(name, plan.tasks[name].host, gpus, t.started, lasted, why, try_))
    return found


def _why(use: GpuUse, task: Task, t: TaskState) -> tuple[str, str]:
    if use.elsewhere:
        other = ", ".join(map(str, use.elsewhere))
        return f"the script chooses for itself: it uses GPU {other}", "leave CUDA_VISIBLE_DEVICES as Muster sets it"
    if use.hidden is not None:
        where = "env of the host" if task.env.get("CUDA_VISIBLE_DEVICES") == use.hidden else "a script around it"
        return (
            f"CUDA_VISIBLE_DEVICES is {use.hidden!r} in its process ({where}?), which hides it",
            "leave CUDA_VISIBLE_DEVICES as Muster sets it",
        )
    if use.no_cuda:
        return f"a CUDA library is missing there; its log says: {use.no_cuda}", CHECK
    if "libcuda" in use.loaded:
        return (
            "the script pins its work to /CPU:0 or hides the GPU (set_visible_devices, CUDA_VISIBLE_DEVICES)",
            "print(tf.config.list_logical_devices()) in the script",
        )
    if "TensorFlow" in use.loaded:
        return "its TensorFlow is built without CUDA, or finds no CUDA library", CHECK
    return "it computes with something that knows no CUDA: neither TensorFlow nor libcuda is in its memory", CHECK


def shared(state: State) -> Iterator[tuple[str, str, str]]:
    """(task, GPU, who) for each process of strangers on a GPU that a living task was given."""
    for name, t in state.tasks.items():
        for gpu, who in t.gpus.others.items() if t.gpus and t.phase in ALIVE else ():
            for stranger in who:
                yield name, gpu, stranger
