"""`python -m benchmarks.peers.torch_program KIND M PROCESS PROCESSES PORT`: run the same model in PyTorch, by a Python that has it.

KIND is `single` (one process), `ddp` (DistributedDataParallel), or a schedule of torch.distributed.pipelining, as in `PIPELINES`.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.serve import serve, step_by_step
from benchmarks.sizes import PEERS, warm_up

PIPELINES = {
    "gpipe": (schedules.ScheduleGPipe, "straight"),
    "1f1b": (schedules.Schedule1F1B, "straight"),
    "interleaved_1f1b": (schedules.ScheduleInterleaved1F1B, "looped"),
    "interleaved_zero_bubble": (schedules.ScheduleInterleavedZeroBubble, "looped"),
    "looped_bfs": (schedules.ScheduleLoopedBFS, "looped"),
    "zb_v": (schedules.ScheduleZBVZeroBubble, "v"),
    "dualpipe_v": (schedules.ScheduleDualPipeV, "v"),
}
"""The class of each schedule, and how its stages lie: one on each process, or two, looped or in a V."""


def main() -> None:
    """Warm up, then run the steps that standard input requests."""
    kind, (microbatches, process, processes, port) = sys.argv[1], map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if processes > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=process, world_size=processes)
    tokens = torch.randint(0, PEERS.vocabulary, (PEERS.rows * microbatches, PEERS.sequence + 1))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if kind in PIPELINES:
        numbers, parts = _stages(PIPELINES[kind][1], process, processes)
        model: nn.Module = nn.ModuleList(Part(number, parts) for number in numbers)
        count = torch.tensor(_count(model))
        dist.all_reduce(count)
        step = _pipeline_step(kind, model, numbers, parts, microbatches, inputs, labels)
    else:
        model = Part(0, 1)
        count = torch.tensor(_count(model))
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        of_process = slice(process, None, processes)
        step = _plain_step(model, inputs.split(PEERS.rows)[of_process], labels.split(PEERS.rows)[of_process])
    for _ in range(warm_up(microbatches)):
        step()
    serve(step_by_step(step), parameters=int(count))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        w = PEERS.width
        self.attention_norm, self.mlp_norm = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.project = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.expand, self.contract = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to one microbatch."""
        b, s, w = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(b, s, 3, PEERS.heads, w // PEERS.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.contract(nn.functional.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))


class Part(nn.Module):
    """One of `parts` equal parts of the model: the first has the embedding, the last the head."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [Block() for _ in range(PEERS.layers // parts)]
        if part == 0:
            layers.insert(0, nn.Embedding(PEERS.vocabulary, PEERS.width))
        if part == parts - 1:
            layers += [nn.LayerNorm(PEERS.width), nn.Linear(PEERS.width, PEERS.vocabulary)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the part to one microbatch."""
        return self.layers(x)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)


def _plain_step(model: nn.Module, inputs: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Return a step over this process's microbatches; gradients are averaged over processes in the last backward."""
    optimizer, last = _optimizer(model), len(inputs) - 1

    def step() -> None:
        optimizer.zero_grad()
        for i, (x, y) in enumerate(zip(inputs, labels, strict=True)):
            waits = isinstance(model, nn.parallel.DistributedDataParallel) and i < last
            with model.no_sync() if waits else contextlib.nullcontext():
                (_loss(model(x), y) / len(inputs)).backward()
        optimizer.step()

    return step


def _stages(layout: str, process: int, processes: int) -> tuple[list[int], int]:
    """Return the stages of a process, and the number of all stages."""
    if layout == "straight":
        return [process], processes
    return [process, process + processes if layout == "looped" else 2 * processes - 1 - process], 2 * processes


def _pipeline_step(
    kind: str, model: nn.ModuleList, numbers: list[int], parts: int, microbatches: int, inputs: torch.Tensor, labels: torch.Tensor
) -> Callable[[], None]:
    stages = [PipelineStage(part, number, parts, torch.device("cpu")) for part, number in zip(model, numbers, strict=True)]
    schedule = PIPELINES[kind][0](stages if parts > dist.get_world_size() else stages[0], microbatches, loss_fn=_loss)
    optimizer = _optimizer(model)
    arguments = (inputs,) if 0 in numbers else ()
    wanted: dict[str, Any] = {"target": labels, "losses": []} if parts - 1 in numbers else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*arguments, **wanted)
        optimizer.step()

    return step


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
