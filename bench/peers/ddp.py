"""PyTorch DistributedDataParallel over gloo. Runs in an environment of its own: PyTorch is no dependency of Muster.

/path/to/python -m bench.peers.ddp W1         with MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, in each worker
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

from bench.measure.workloads import WORKLOADS, digits, rows
from bench.peers.loop import serve


class Parallel:
    stride = 1

    def __init__(self, workload: str, rank: int) -> None:
        self.work = work = WORKLOADS[workload]
        self.phases: dict[str, float] = {}
        layers: list[nn.Module] = []
        for wide, narrow in zip(work.sizes[:-1], work.sizes[1:], strict=True):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.model = nn.Sequential(*layers[:-1])
        self.reset(True)
        self.parallel = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.parallel.parameters(), lr=work.rate)
        self.x, self.y = (torch.from_numpy(part) for part in digits())
        self.rows, self.loss = rows(rank), nn.CrossEntropyLoss()
        self.done = 0

    def reset(self, first: bool) -> int:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.work.start(), strict=True):
                parameter.copy_(torch.from_numpy(value.T if value.ndim == 2 else value))
        return getattr(self, "done", 0)

    def step(self) -> tuple[int, float]:
        chosen = torch.from_numpy(next(self.rows))
        loss = self.loss(self.parallel(self.x[chosen]), self.y[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return self.done, float(loss)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.distributed.init_process_group("gloo")
    serve({"ddp": Parallel(sys.argv[1], int(os.environ["RANK"]))})


if __name__ == "__main__":
    main()
