"""learn2learn's MAML on our job.

    pip install learn2learn && python benchmarks/peers/learn2learn_maml.py

The network is MAML's (four convolutions of 32 filters, a linear layer), adapted with second-order gradients.
"""

import torch
from peer import draw_task, find_device, job_of, load, parse, time_and_print
from torch import Tensor, nn

from fastweights.bench import SHAPES


def network(shape: tuple[int, ...], way: int, filters: int = 32) -> nn.Module:
    """The network of Finn et al. (2017) for mini-ImageNet; batch norm by the batch, as theirs does."""
    layers: list[nn.Module] = []
    channels = shape[2]
    for _ in range(4):
        convolution = nn.Conv2d(channels, filters, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(filters, track_running_stats=False), nn.ReLU(), nn.MaxPool2d(2)]
        channels = filters
    places = (shape[0] // 16) * (shape[1] // 16)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(filters * places, way))


def main() -> None:
    parser = parse("Time learn2learn's MAML.")
    parser.add_argument("--steps", type=int, default=5, help="gradient steps on a task")
    options = parser.parse_args()
    algorithms, version = load("learn2learn", "learn2learn.algorithms")
    device = find_device(options.device)
    task = draw_task(job_of(options), device)
    maml = algorithms.MAML(network(SHAPES[options.shape][0], options.way).to(device), lr=0.01, first_order=False)
    optimizer = torch.optim.Adam(maml.parameters(), lr=1e-3)
    adapted = maml

    def adapt(first_order: bool) -> nn.Module:
        learner = maml.clone(first_order=first_order)
        for _ in range(options.steps):
            learner.adapt(nn.functional.cross_entropy(learner(task.support_x), task.support_y))
        return learner

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(adapt(first_order=False)(task.query_x), task.query_y).backward()
        optimizer.step()

    def describe() -> None:
        nonlocal adapted
        adapted = adapt(first_order=True)  # nothing is learned from it: no second derivatives

    @torch.no_grad()
    def predict() -> Tensor:
        return adapted(task.query_x)

    name = f"learn2learn {version} MAML, {options.steps} steps"
    time_and_print(name, options, device, train, describe, predict)


if __name__ == "__main__":
    main()
