"""easyfsl's Prototypical Networks on our job.

    pip install easyfsl && python benchmarks/peers/easyfsl_prototypical.py

Its backbone is the fwCNN's own encoder, layer by layer in float32, so that what is compared is the libraries.
"""

import torch
from peer import draw_task, find_device, job_of, load, parse, time_and_print
from torch import Tensor, nn

from fastweights.bench import SHAPES
from fastweights.nn.encoders import CNN


class Backbone(nn.Module):
    """The encoder, given images (B, C, H, W)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.encoder = CNN(shape, filters=32 if max(shape) > 32 else 64)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images.permute(0, 2, 3, 1))


def main() -> None:
    options = parse("Time easyfsl's Prototypical Networks.").parse_args()
    methods, version = load("easyfsl", "easyfsl.methods")
    device = find_device(options.device)
    task = draw_task(job_of(options), device)
    model = methods.PrototypicalNetworks(Backbone(SHAPES[options.shape][0])).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train() -> None:
        model.train()
        optimizer.zero_grad()
        model.process_support_set(task.support_x, task.support_y)
        nn.functional.cross_entropy(model(task.query_x), task.query_y).backward()
        optimizer.step()

    @torch.no_grad()
    def describe() -> None:
        model.eval()
        model.process_support_set(task.support_x, task.support_y)

    @torch.no_grad()
    def predict() -> Tensor:
        return model(task.query_x)

    time_and_print(f"easyfsl {version} ProtoNet", options, device, train, describe, predict)


if __name__ == "__main__":
    main()
