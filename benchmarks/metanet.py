"""MetaNet with all tasks, examples and queries at once against MetaNet as its authors wrote it.

    python benchmarks/metanet.py                        # on a GPU: mini-ImageNet's shapes, 5-way 1-shot
    python benchmarks/metanet.py --device cpu --shape omniglot --queries 1 --tasks 2

`AsWritten` is the same model with the same weights, by loops: one task at a time, a backward pass for every support
example, fast weights assembled for every query. It runs operation by operation, without a CUDA graph, in float32.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import bench
from fastweights.learners import LearnerSettings, build_learner, preset
from fastweights.learners.checks import State
from fastweights.learners.metanet import HIDDEN, OUTPUT, MetaNet
from fastweights.nn.coordinates import log_and_sign
from fastweights.tasks.episodes import Episode, EpisodeSampler
from fastweights.utils.devices import find_device

KINDS = {"convolutions": str.isdigit, "dense": lambda name: not name.isdigit()}
Weights = Mapping[str, Tensor]


class AsWritten(MetaNet):
    """The same answers, one example after the other."""

    def forward(self, episode: Episode) -> Tensor:
        return self.predict(self.describe(episode.support_x, episode.support_y, episode.way), episode.query_x)

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        tasks = [self.describe_one(x, y) for x, y in zip(support_x, support_y, strict=True)]
        slots = torch.arange(way or int(support_y.max()) + 1, device=support_x.device).expand(len(support_x), -1)
        return {"slots": slots, **{name: torch.stack([task[name] for task in tasks]) for name in tasks[0]}}

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        tasks = [{name: tensor[t] for name, tensor in state.items()} for t in range(len(query_x))]
        return torch.stack([self.answer_one(task, x) for task, x in zip(tasks, query_x, strict=True)])

    def describe_one(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        memory = []
        for h, label in zip(self.lower_of("base", x), y, strict=True):
            gradient = self.gradient("base", h.unsqueeze(0), label.unsqueeze(0))
            memory.append(self.map_by_kind(gradient))
        task_level = self.task_level(self.lower_of("key", x), y)
        keys = self.run("key", self.lower_of("key", x), task_level, to_keys=True)
        example_level = {f"base.{name}": torch.stack([one[name] for one in memory]) for name in memory[0]}
        return {"keys": keys, **example_level, **{f"key.{name}": weight for name, weight in task_level.items()}}

    def map_by_kind(self, gradients: Weights) -> dict[str, Tensor]:
        return {
            name: self.example_maps[kind].mlp(log_and_sign(gradient)).squeeze(-1)
            for kind, is_of in KINDS.items()
            for name, gradient in gradients.items()
            if is_of(name)
        }

    def task_level(self, h: Tensor, y: Tensor) -> dict[str, Tensor]:
        size, states = max(1, len(y) // self.parts), {}
        for part, labels in zip(h.split(size), y.split(size), strict=True):
            for name, gradient in self.gradient("key", part, labels).items():
                lstm = self.task_maps["convolutions" if name.isdigit() else "dense"]
                states[name] = lstm.cell(log_and_sign(gradient.flatten()), states.get(name))
        weights = self.key.weights
        return {
            name: self.task_maps["convolutions" if name.isdigit() else "dense"].readout(h).view_as(weights[name])
            for name, (h, _) in states.items()
            if name != OUTPUT
        }

    def answer_one(self, state: State, x: Tensor) -> Tensor:
        task_level = {name.removeprefix("key."): w for name, w in state.items() if name.startswith("key.")}
        memory = {name.removeprefix("base."): w for name, w in state.items() if name.startswith("base.")}
        answers = []
        for h, k in zip(self.lower_of("base", x), self.lower_of("key", x), strict=True):
            key = self.run("key", k.unsqueeze(0), task_level, to_keys=True)
            attention = F.cosine_similarity(key, state["keys"], dim=-1).softmax(0)
            fast = {name: torch.tensordot(attention, weights, dims=1) for name, weights in memory.items()}
            answers.append(self.run("base", h.unsqueeze(0), fast)[0, state["slots"]])
        return torch.stack(answers)

    def lower_of(self, network: str, x: Tensor) -> Tensor:
        return getattr(self, network).lower(x.unsqueeze(0))[0]

    def gradient(self, network: str, h: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            weights = {name: w.detach().requires_grad_() for name, w in getattr(self, network).weights.items()}
            loss = F.cross_entropy(self.run(network, h.detach(), None, slow=weights), y)
            return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))

    def run(
        self, name: str, h: Tensor, fast: Weights | None, *, to_keys: bool = False, slow: Weights | None = None
    ) -> Tensor:
        network = getattr(self, name)
        slow = slow or network.weights
        paths = [slow] if fast is None else [slow, fast]
        for layer in map(str, network.fast_layers):
            filters = [path[layer].view(-1, h.shape[1], 3, 3) for path in paths]
            outputs = [F.leaky_relu(F.conv2d(h, each, padding=1), network.slope) for each in filters]
            h = F.max_pool2d(sum(outputs), 2, ceil_mode=True)
        h = h.flatten(1)
        outputs = [h @ path[HIDDEN].T for path in paths]
        if to_keys:
            return sum(outputs)
        h = sum(F.leaky_relu(output, network.slope) for output in outputs)
        return sum(h @ path[OUTPUT].T for path in paths)


def as_written(learner: MetaNet) -> AsWritten:
    """The same model by loops: it shares the weights."""
    twin = AsWritten.__new__(AsWritten)
    twin.__dict__ = learner.__dict__
    return twin


def time_as_written(
    settings: LearnerSettings, job: bench.Job, device: torch.device, runs: int
) -> dict[str, list[float]]:
    """Milliseconds a task of training steps and of both phases, one task at a time."""
    learner = as_written(build_learner(settings).to(device))
    items = bench.random_items(job.dataset, job.shot + job.queries, device)
    sampler, optimizer = EpisodeSampler(items, job.way, job.shot, job.queries), torch.optim.Adam(learner.parameters())

    def train() -> None:
        optimizer.zero_grad()
        learner.training_loss(sampler.draw(1))[0].backward()
        optimizer.step()

    @torch.no_grad()
    def inference() -> None:
        learner(sampler.draw(1))

    found = {"train": bench.time_runs(train, device, runs)}
    learner.eval()
    return {**found, "inference": bench.time_runs(inference, device, runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="mini-imagenet", choices=("mini-imagenet", "omniglot"))
    parser.add_argument("--tasks", type=int, default=16, help="tasks at once")
    parser.add_argument("--queries", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append a line to this file")
    options = parser.parse_args()
    device = find_device(options.device)
    job = bench.Job(options.shape, way=5, shot=1, queries=options.queries, tasks=options.tasks)
    shape = (84, 84, 3) if options.shape == "mini-imagenet" else (28, 28, 1)
    settings = preset("metanet-cnn", dataset=options.shape, item_shape=shape, vocabulary=0, way=5, shot=1)
    ours = bench.measure("metanet-cnn", settings, job, device, "float32", options.runs)
    theirs = time_as_written(settings, job, device, options.runs)
    line: dict[str, Any] = {**ours, "learner": "metanet-cnn, all at once and as written"}
    for phase, times in theirs.items():
        as_one, at_once = statistics.median(times), statistics.median(ours[f"{phase}_ms"])
        line[f"{phase}_as_written_ms"] = [round(ms, 6) for ms in times]
        print(f"{phase}: {as_one:.4g} ms a task as written, {at_once:.4g} at once: {as_one / at_once:.3g} times faster")
    if options.out:
        with open(options.out, "a") as record:
            record.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
