"""The fast path on a GPU agrees with the plain one. Skipped where there is none."""

from dataclasses import replace

import pytest
import torch
from support import blobs

from fastweights.data.items import Dataset
from fastweights.evaluation import evaluate
from fastweights.learners import build_learner
from fastweights.learners.registry import LearnerSettings
from fastweights.nn.encoders import CNN, ResNet
from fastweights.nn.rules import RULES, Gradient
from fastweights.tasks.episodes import EpisodeSampler, EvaluationTasks
from fastweights.training.loop import Training, resume
from fastweights.training.objectives import MetaObjective
from fastweights.training.settings import TrainSettings
from fastweights.training.step import Rate, TrainStep
from fastweights.utils.precision import autocast

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NARROW = LearnerSettings(item_shape=(8, 8, 1), filters=16, layers=3, batch_norm=3, width=64, label_noise=0.01)
SHORT = TrainSettings(steps=40, queries=3, tasks_per_step=8, validate_every=160, validation_tasks=20, test_tasks=30)


def make_step(learner, settings: TrainSettings, graph: bool) -> TrainStep:
    sampler = EpisodeSampler(blobs(40, 10, 0).to("cuda"), 5, 1, 3)
    rate = Rate(settings.learning_rate, settings.schedule)
    objective, device = MetaObjective(learner, sampler, settings), sampler.items.device
    parts, clip_norm = [(1.0, learner.parameters())], settings.clip_norm
    return TrainStep(objective, parts, rate, seed="0", clip_norm=clip_norm, device=device, graph=graph)


def losses(settings: TrainSettings, graph: bool, steps: int = 12, rule: str = "hebb") -> list[float]:
    torch.manual_seed(0)
    learner = build_learner(replace(NARROW, rule=rule)).cuda().train()
    step = make_step(learner, settings, graph)
    for i in range(steps):
        step(i, 0.0)
    assert step.is_graph == graph
    return step.metrics()[:, 0].tolist()


@pytest.mark.parametrize(
    ("precision", "clip_norm", "tolerance"), [("float32", 0.0, 1e-3), ("float32", 0.1, 1e-3), ("bfloat16", 0.0, 2e-2)]
)
def test_a_captured_step_equals_a_plain_one(precision, clip_norm, tolerance):
    """The same tasks, the same noise, the same updates: graphs draw anew at every replay."""
    settings = replace(SHORT, precision=precision, clip_norm=clip_norm)
    plain, captured = losses(settings, graph=False), losses(settings, graph=True)
    assert captured == pytest.approx(plain, rel=tolerance)
    assert len(set(captured)) == len(captured)


@pytest.mark.parametrize(("system", "expected"), [("snail", {"high"}), ("fast-weights", {"highest"})])
def test_only_learners_that_allow_it_multiply_in_tf32(system, expected):
    """In all of a step, forwards and backwards, and in a validation."""
    torch.manual_seed(0)
    model = build_learner(LearnerSettings(system=system, item_shape=(8, 8, 1), filters=16, layers=3))
    said = set()

    def listen(_, __, out):
        said.add(torch.get_float32_matmul_precision())
        if out.requires_grad:
            out.register_hook(lambda _: said.add(torch.get_float32_matmul_precision()))

    splits = {name: blobs(10, 10, seed) for seed, name in enumerate(("train", "val", "test"))}
    settings = replace(SHORT, steps=6, precision="bfloat16", validate_every=16)
    training = Training(model, settings, Dataset("blobs", splits, "blobs"), "cuda")
    model.encoder.register_forward_hook(listen)  # now: the rehearsal of kernels does not count
    training.run()
    assert said == expected
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_step_is_captured_anew_when_the_tasks_change():
    settings = replace(SHORT, precision="float32")

    def losses_over_a_change(graph: bool) -> list[float]:
        torch.manual_seed(0)
        step = make_step(build_learner(NARROW).cuda().train(), settings, graph)
        for i in range(16):
            if i == 8:
                step.objective.sampler = EpisodeSampler(step.objective.sampler.items, 5, 2, 3)
                step.expect_change()
            step(i, 0.0)
        assert step.is_graph == graph
        return step.metrics()[:, 0].tolist()

    assert losses_over_a_change(True) == pytest.approx(losses_over_a_change(False), rel=1e-3)


def test_shapes_that_come_again_keep_their_graphs():
    settings = replace(SHORT, precision="float32")

    def losses_of_two_shapes(graph: bool) -> list[float]:
        torch.manual_seed(0)
        step = make_step(build_learner(NARROW).cuda().train(), settings, graph)
        samplers = [EpisodeSampler(step.objective.sampler.items, 5, shot, 3) for shot in (1, 2)]
        for i in range(20):
            step.objective.sampler = samplers[i % 2]
            step.expect_change(i % 2)
            step(i, 0.0)
        captured = [shape.graph for shape in step._shapes.values()]
        assert len(captured) == 2
        assert all((one is not None) == graph for one in captured)
        return step.metrics()[:, 0].tolist()

    assert losses_of_two_shapes(True) == pytest.approx(losses_of_two_shapes(False), rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "steps", "tolerance"), [("gradient", 12, 1e-3), ("gradient1", 12, 1e-3), ("gradient-log", 4, 5e-3)]
)
def test_a_captured_step_of_the_gradient_rule_equals_a_plain_one(rule, steps, tolerance, monkeypatch):
    """By the fused kernels, captured and not, and by the plain path.

    Logarithms tell tiny gradients apart, which rounding decides: two equal runs were 1.6 % apart at the fifth step.
    """
    settings = replace(SHORT, precision="float32")
    monkeypatch.setattr(Gradient, "fusible", True)
    captured, fused = (losses(settings, graph, steps, rule) for graph in (True, False))
    monkeypatch.setattr(Gradient, "fusible", False)
    plain = losses(settings, graph=False, steps=steps, rule=rule)
    assert captured == pytest.approx(fused, rel=tolerance)
    assert fused == pytest.approx(plain, rel=tolerance)


@pytest.mark.parametrize("rule", ["gradient", "gradient-log"])
def test_millions_of_coordinates_are_mapped_as_exactly_as_by_the_plain_path(rule):
    """Against float64; rounding decides the slope where a unit is next to zero, so both have some error."""
    torch.manual_seed(0)
    mapping = RULES[rule]().cuda()
    x, direction = torch.randn(2, 16, 288, 288, device="cuda").unbind()

    def values_and_gradients(rule: Gradient, x: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = rule.map_gradient(x)
        return [y, *torch.autograd.grad(y, [x, *rule.parameters()], direction)]

    mapping.fusible = True
    fused = values_and_gradients(mapping, x, direction)
    mapping.fusible = False
    plain = values_and_gradients(mapping, x, direction)
    exact = values_and_gradients(mapping.double(), x.double(), direction.double())
    for ours, theirs, truth in zip(fused, plain, exact, strict=True):
        ours_error, theirs_error = ((t.double() - truth).norm() / truth.norm() for t in (ours, theirs))
        assert ours_error < 10 * theirs_error + 1e-5


def test_a_captured_step_obeys_the_learning_rate():
    torch.manual_seed(0)
    learner = build_learner(NARROW).cuda().train()
    settings = replace(SHORT, schedule="cosine")
    step = make_step(learner, settings, graph=True)
    for i in range(6):
        step(i, 0.0)
    before = learner.hidden.slow.weight.clone()
    step(6, 1.0)  # the end of the cosine: a rate of zero
    assert torch.equal(learner.hidden.slow.weight, before)
    step(7, 0.0)
    assert not torch.equal(learner.hidden.slow.weight, before)


@pytest.mark.parametrize("training", [True, False])
def test_the_fused_network_agrees_with_the_plain_one(training):
    torch.manual_seed(0)
    network = CNN((84, 84, 3), filters=32).cuda().train(training)
    images = torch.randint(0, 256, (32, 84, 84, 3), dtype=torch.uint8, device="cuda")
    with torch.set_grad_enabled(training):
        with autocast("bfloat16", images.device):
            fused = network(images)
        network.fusible = False
        with autocast("bfloat16", images.device):
            rounded = network(images)
        plain = network(images).double()

    def error(x: torch.Tensor) -> float:
        return ((x.double() - plain).norm() / plain.norm()).item()

    assert fused.requires_grad == training
    assert error(fused) < 1.5 * error(rounded) + 1e-3
    assert error(fused) < 0.05


def test_a_network_in_eval_mode_still_has_gradients():
    network = CNN((28, 28, 1), filters=32).cuda().eval()
    images = torch.randint(0, 256, (4, 28, 28, 1), dtype=torch.uint8, device="cuda")
    with autocast("bfloat16", images.device):
        network(images).sum().backward()
    assert network.convolutions[0].weight.grad is not None


def test_training_on_a_gpu_goes_on_where_it_was_interrupted(dataset, tmp_path):
    settings = replace(SHORT, steps=6, precision="bfloat16")
    Training(NARROW, settings, dataset, "cuda", tmp_path).run(test=False)
    resumed = resume(tmp_path, dataset, "cuda", steps=12)
    assert resumed.counters.step == 6
    assert resumed.run(test=False).counters.step == 12


def test_training_on_a_gpu_learns(dataset):
    settings = replace(SHORT, steps=300, validate_every=1200, learning_rate=5e-3, precision="bfloat16")
    outcome = Training(NARROW, settings, dataset, "cuda").run()
    assert outcome.test.accuracy > 0.6


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_evaluation_by_shared_keys_agrees_with_the_cpu(precision):
    torch.manual_seed(0)
    learner, items = build_learner(replace(NARROW, system="prototypical")), blobs(12, 10, 2)
    tasks = EvaluationTasks(Dataset("blobs", {"test": items}, "blobs"), "test", way=5, shot=1, queries=3, tasks=150)
    expected = evaluate(learner, items, tasks).accuracy
    found = evaluate(learner.cuda(), items.to("cuda"), tasks, precision).accuracy
    assert found == pytest.approx(expected, abs=0.002 if precision == "float32" else 0.03)


@pytest.mark.parametrize("encoder", ["cnn", "resnet"])
def test_maml_by_its_own_layers_equals_the_plain_ones(encoder, monkeypatch):
    """Answers and meta-gradients, in float32, on a GPU and on a CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a ResNet's 1x1 convolutions would round to 10 bits
    chosen = {"blocks": (16, 24), "features": 32} if encoder == "resnet" else {}
    settings = replace(NARROW, system="maml", encoder=encoder, item_shape=(8, 8, 3), **chosen)
    torch.manual_seed(0)
    learner = build_learner(settings)
    images = torch.randint(0, 256, (3, 20, 8, 8, 3), dtype=torch.uint8)
    labels = torch.arange(5).repeat(3, 4)
    found = []
    for device in ("cpu", "cuda"):
        there = build_learner(settings).to(device).eval()
        there.load_state_dict(learner.state_dict())
        x, y = images.to(device), labels.to(device)
        logits = there.predict(there.describe(x[:, :5], y[:, :5]), x)
        loss = torch.nn.functional.cross_entropy(logits.mT, y)
        grads = torch.autograd.grad(loss, list(there.parameters()))
        found.append([logits.cpu(), *(g.cpu() for g in grads)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=2e-4)


def test_a_resnet_with_aligned_channels_equals_the_plain_one():
    torch.manual_seed(0)
    encoder = ResNet((12, 12, 3), blocks=(8, 16), features=24).train()
    images = torch.randint(0, 256, (6, 12, 12, 3), dtype=torch.uint8)
    found = []
    for device in ("cpu", "cuda"):
        there = ResNet((12, 12, 3), blocks=(8, 16), features=24).to(device).train()
        there.load_state_dict(encoder.state_dict())
        keys = there(images.to(device))
        grads = torch.autograd.grad(keys.square().mean(), list(there.parameters()))
        found.append([keys.cpu(), *(g.cpu() for g in grads)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=2e-3)
