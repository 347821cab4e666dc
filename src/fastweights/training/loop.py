"""The one training loop: draw tasks, step, validate now and then, keep the best, test once at the end."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastweights.data.items import Dataset, Items, TextItems
from fastweights.evaluation import MULTIPLE, Evaluation, evaluate, evaluating
from fastweights.kernels.rehearsal import rehearse
from fastweights.learners import saved as files
from fastweights.learners.base import KeyLearner, Learner, parameters_above
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.nn.encoders.base import Encoder
from fastweights.tasks.episodes import EpisodeSampler, EvaluationTasks
from fastweights.training import checkpoint
from fastweights.training.distributed import ALONE, Ranks
from fastweights.training.interrupts import StopRequest
from fastweights.training.logs import Sink
from fastweights.training.objectives import MetaObjective, new_head
from fastweights.training.pretraining import EncoderCache, Pretraining, Progress
from fastweights.training.settings import TrainSettings
from fastweights.training.step import EMA, Part, Rate, TrainStep, mean_of_finite
from fastweights.utils.arguments import a_path, require
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError
from fastweights.utils.precision import autocast, products
from fastweights.utils.seeds import seed_of, seed_weights

Weights = Mapping[str, Tensor]
MODEL = files.MODEL
CHECKPOINT, LOG, PRETRAINED = "checkpoint.safetensors", "log.jsonl", "pretrained"
"""The files of a run's folder, and the folder in it of an encoder that was pre-trained for it alone."""
CHECKPOINT_SECONDS = 15.0
"""Checkpoints are written after a validation, but not more often than this."""
STEPS_IN_A_VISIT = 10
"""After so many steps another training may have its turn."""
Visits = Generator[bool, int | None, None]
"""A training in turns with others: see `Training.visits`."""


@dataclass
class Counters:
    """Where a run stands; everything besides tensors that a checkpoint must remember."""

    step: int = 0
    seconds: float = 0.0
    best_accuracy: float = -1.0
    best_step: int = 0
    validated_step: int = 0
    pretrained: bool = False
    side_by_side: int = 1
    """The most trainings, this one among them, that shared its device by turns."""

    @property
    def begun(self) -> bool:
        """Whether anything was done that a checkpoint would be missed for; a pre-training half done is in the cache."""
        return self.step > 0 or self.pretrained


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    counters: Counters
    interrupted: bool
    test: Evaluation | None
    """None where the run was interrupted or no test was wanted: the test split is touched once, at the end."""


class Training:
    """A run in progress: a learner, its data, its optimiser and where it stands."""

    def __init__(
        self,
        learner: LearnerSettings | Learner,
        settings: TrainSettings,
        dataset: Dataset,
        device: torch.device | str = "cpu",
        folder: Path | str | None = None,
        sinks: Sequence[Sink] = (),
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        ranks: Ranks = ALONE,
        cache: EncoderCache | None = None,
        items: Mapping[str, Items] | None = None,
    ) -> None:
        """Train a learner, given as settings or as an instance with fresh weights of its own.

        `items` are the splits of the dataset on the device, where another training has them there already.
        """
        require("what is trained", learner, (LearnerSettings, Learner), "a Learner, or the LearnerSettings of one")
        require("how it is trained", settings, TrainSettings, "a TrainSettings")
        require("what it is trained on", dataset, Dataset, "a Dataset")
        device = find_device(device)
        self.learner_settings = settings_for(learner, settings, dataset)
        check_fit(self.learner_settings, settings, dataset)
        settings = replace(settings, dataset=dataset.name, variant=dataset.variant, data_hash=dataset.content_hash)
        self.settings, self.dataset = settings, dataset
        self.folder = None if folder is None else a_path("the folder of a run", folder)
        self.sinks, self.checkpoint_seconds = list(sinks), checkpoint_seconds
        seed_weights(settings.seed)
        built = learner if isinstance(learner, Learner) else build_learner(learner)
        self.learner = accelerated(built.to(device)).train()
        self._check_learner()
        self.items = {name: split.to(device) for name, split in (items or dataset.splits).items()}
        if settings.train_on_validation:
            held_out = ("val", "test") if settings.train_on_test else ("val",)
            self.items["train"] = dataset.with_held_out(*held_out).to(device)
        self.ranks, self.device = ranks, self.items["train"].device
        self.cache = EncoderCache(self.folder / PRETRAINED) if cache is None and self.folder is not None else cache
        if not self.learner_settings.encoder:  # nobody knows what an encoder from outside depends on
            self.cache = None
        self.ema = EMA(self.learner, settings.ema_decay) if settings.ema_decay else None
        torch.manual_seed(seed_of(f"seed {settings.seed} pretraining"))
        wants_head = settings.pretrain_steps or settings.classifier_weight
        self.head = new_head(self.learner, self.items["train"].classes, self.device) if wants_head else None
        way, _, queries = settings.training_task
        self._samplers = [self._sampler(way, shot, queries) for shot in settings.training_shots]
        sampler = self._samplers[-1]
        self.objective = MetaObjective(self.learner, sampler, settings, ranks, self.classifier)
        shape = {"way": settings.way, "shot": settings.shot, "queries": settings.queries}
        self.finetune_sampler = self._sampler(**shape) if settings.finetune_steps else sampler
        if self._captures_graphs:
            self._rehearse()  # before the optimiser is made: see `rehearse`
        self.take_step = TrainStep(
            self.objective,
            self._parts(),
            rate_of(settings),
            seed=f"seed {settings.seed}",
            weight_decay=settings.weight_decay,
            optimizer=settings.optimizer,
            clip_norm=settings.clip_norm,
            device=self.device,
            ema=self.ema,
            graph=self._captures_graphs,
            context=partial(products, self.learner.allows_tf32, settings.precision, self.device),
            ranks=ranks,
        )
        self.evaluation_tasks = {  # now, so that data too small for them fail before the work
            split: EvaluationTasks(dataset, split, **shape, tasks=tasks)
            for split, tasks in (("val", settings.validation_tasks), ("test", settings.test_tasks))
        }
        self.counters = Counters()
        self.best = _copy(self.learner.state_dict())
        self._saved_at = time.monotonic()
        self._logged_step, self._logged_at = 0, time.monotonic()
        self.request, self._stop = StopRequest(answered=ranks.first), False
        self._deadline = math.inf
        self._owns_folder = False

    def _check_learner(self) -> None:
        """Refuse settings that the learner has no use for."""
        s, name = self.settings, type(self.learner).__name__
        if not list(self.learner.parameters()):
            raise UserError(f"{name} has no parameters to train; evaluate it as it is.")
        for kept, tensor in self.learner.state_dict().items():
            if not isinstance(tensor, Tensor) or is_lazy(tensor):
                raise UserError(
                    f"{name} keeps {kept}, which is no tensor of a known shape; checkpoints hold no others."
                )
        if s.key_norm and not (self.learner.scales_keys and self.learner.by_keys):
            raise UserError(f"key_norm is for learners that scale their keys, as fast weights do; {name} does not.")
        if s.freeze_encoder_steps and not (parameters_above(self.learner) or s.classifier_weight):
            raise UserError("freeze_encoder_steps is for learners that learn something above their encoder.")
        if (self._encoder_is_apart or s.pretrain_steps) and not hasattr(self.learner, "encoder"):
            raise UserError(f"{name} has no encoder to pre-train, to freeze or to train at a rate of its own.")

    def _sampler(self, way: int, shot: int, queries: int) -> EpisodeSampler:
        """Draws training tasks of such a shape."""
        items = self.items["train"]
        if self.dataset.manifest.get("drop_small_classes"):  # rare words, say: of no use with so many shots
            if self.settings.classifier_weight:
                raise UserError(f"classifier_weight is not for {self.dataset.name}, which leaves out rare classes.")
            items = items.with_at_least(shot + queries)
        try:
            return EpisodeSampler(items, way, shot, queries)
        except UserError as error:
            raise UserError(f"{self.dataset.full_name}, train split: {error}") from None

    @property
    def log_step(self) -> int | None:
        """From where on a log is to be written: None where there is nothing before it."""
        return self.counters.step if self.counters.begun or self._is_pretraining_cached else None

    @property
    def _is_pretraining_cached(self) -> bool:
        """Whether an encoder, perhaps half pre-trained, outlived a run that left no checkpoint."""
        if self.cache is None or not self.settings.pretrain_steps:
            return False
        return self.cache.path(self.learner_settings, self.settings).exists()

    @property
    def classifier(self) -> nn.Module | None:
        """The head of all training classes, where it is trained besides the learner."""
        return self.head if self.settings.classifier_weight else None

    def _parts(self) -> list[Part]:
        """What is trained: all at one rate, or the encoder, the first part, at its own."""
        auxiliary = [] if self.classifier is None else list(self.classifier.parameters())
        if not self._encoder_is_apart:
            return [(1.0, [*self.learner.parameters(), *auxiliary])]
        encoder = list(self.learner.encoder.parameters())
        return [(self.settings.encoder_lr_scale, encoder), (1.0, [*parameters_above(self.learner), *auxiliary])]

    @property
    def _encoder_is_apart(self) -> bool:
        return self.settings.encoder_lr_scale != 1 or self.settings.freeze_encoder_steps > 0

    @property
    def _captures_graphs(self) -> bool:
        return self.device.type == "cuda" and capturable(self.learner)

    def restore(self, saved: files.Saved) -> None:
        """Go on exactly where a checkpoint was written."""
        self._owns_folder = True
        kept = {"model", "best"} | ({"average"} if self.ema else set()) | ({"classifier"} if self.classifier else set())
        try:
            checkpoint.check_place(saved, self.settings, kept)
        except ValueError as error:
            raise UserError(f"{saved.path} is no whole checkpoint ({error}); {files.remedy_for(saved.path)}.") from None
        files.require_weights(self.learner.state_dict(), saved.section("best"), saved.path)
        self.best = {name: t.to(self.device) for name, t in saved.section("best").items()}
        files.fill(self.learner, saved.section("model"), saved.path)
        if self.classifier is not None:
            files.fill(self.classifier, saved.section("classifier"), saved.path)
        try:
            steps = saved.counters["step"]
            checkpoint.fill_optimizer(self.take_step.optimizer, saved.section("optimizer"), steps)
            if self.ema is not None:
                files.require_weights(self.ema.averages(), saved.section("average"), saved.path)
                self.ema.fill(saved.section("average"))
            self.counters = Counters(**saved.counters)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            remedy = files.remedy_for(saved.path)
            raise UserError(f"{saved.path} is damaged or of another version ({error!r:.200}); {remedy}.") from None

    def run(
        self, deadline: float = math.inf, *, test: bool = True, after_pretraining: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Train to the end, then answer the test tasks once with the best weights, unless told not to.

        Ctrl-C, the deadline (by `time.monotonic`) and too few `seconds` for pre-training leave a checkpoint to resume.
        """
        self.request.asked = False
        with self.request.listening():
            for _ in self.visits(deadline, after_pretraining):
                pass
        return self.outcome(test=test)

    def visits(self, deadline: float = math.inf, after_pretraining: Callable[[], None] = lambda: None) -> Visits:
        """All of `run` but the test, a few steps at a time, so that others may have their turns in between.

        Yields whether what comes next waits for the device; is told how many trainings take turns.
        """
        self._deadline, self._stop = deadline, False
        taken = self.folder is not None and not self._owns_folder and (self.folder / CHECKPOINT).exists()
        if taken and self.ranks.first:
            raise UserError(f"{self.folder} already holds a run; resume it, or choose another folder.")
        self._owns_folder = True
        if self.settings.pretrain_steps and not self.counters.pretrained:
            self.pretrain()
            if self.counters.pretrained:
                after_pretraining()
        if self.counters.step == 0 and not self._stop:
            self._scale_keys()
        yield from self._loop()
        if self.counters.step > self._logged_step:
            self._log()
        self.save()
        if not self._stop and (self.counters.validated_step < self.counters.step or not self._has_validated):
            self._validate()
            self.save()
        self._stop = bool(self.ranks.largest(float(self._stop or self.request.asked), self.device))

    def outcome(self, *, test: bool = True) -> Outcome:
        """How the run ended; where it was not interrupted, the best weights answer the test tasks now."""
        return Outcome(self.counters, self._stop, self._test() if test and not self._stop else None)

    def _rehearse(self) -> None:
        """Have the kernels of an encoder of images compiled together: those of a step and of a validation."""
        encoder = getattr(self.learner, "encoder", None)
        if not isinstance(encoder, Encoder) or encoder.reads_text or self.learner.adapts_encoder:
            return
        s, (way, shot, queries) = self.settings, self.settings.training_task
        images = self.items["train"].values
        some = images[torch.zeros(s.tasks_per_step * way * (shot + queries), dtype=torch.int64, device=images.device)]
        buffers = _copy(dict(encoder.named_buffers()))

        def step_and_validate() -> None:
            with autocast(s.precision, self.device):
                encoder(some).float().sum().backward()
                with evaluating(self.learner), torch.no_grad():
                    encoder(some[: MULTIPLE["cuda"]])

        rehearse(step_and_validate)
        encoder.zero_grad(set_to_none=True)
        for name, buffer in encoder.named_buffers():
            buffer.copy_(buffers[name])  # batch norm has seen garbage

    def pretrain(self) -> None:
        """Pre-train the encoder, from where the cache has it: from nothing, half way or to the end."""
        assert self.head is not None
        untrained = {module: _copy(module.state_dict()) for module in (self.learner.encoder, self.head)}
        work = Pretraining(self.learner, self.head, self.items["train"], self.settings, graph=self._captures_graphs)
        before = 0.0 if self.cache is None else self.cache.take(work, self.learner_settings, self.settings)
        self.counters.seconds, started = before, time.monotonic()  # as if all of it had been trained here and now
        found_done = work.done

        def go_on(progress: Progress) -> bool:
            self._agree(before + time.monotonic() - started)
            self._write("pretrain", **asdict(progress))
            if time.monotonic() - self._saved_at >= self.checkpoint_seconds:
                self._cache(work)
            self._stop |= self.out_of_time and not work.done  # an encoder half trained is no model to test
            return not self._stop

        work.run(go_on)
        if not found_done:
            self._cache(work)
        if not work.done:
            for module, weights in untrained.items():  # the checkpoint is of the time before it
                module.load_state_dict(weights)
            return
        for module in work.kept.values():
            self.ranks.follow_first(module.state_dict().values())  # each has pre-trained for itself
        if self.ema is not None:
            self.ema.restart()
        self.counters.pretrained = True

    def _cache(self, work: Pretraining) -> None:
        for module in work.modules.values():
            _require_finite(module.state_dict(), work.step)
        if self.cache is not None and self.ranks.first:
            self.cache.put(work, self.learner_settings, self.settings, self.counters.seconds)
        self._saved_at = time.monotonic()

    def _scale_keys(self) -> None:
        """Scale keys to the norm that is wanted: on average, in the tasks of one step."""
        s, learner = self.settings, self.learner
        if not s.key_norm:
            return
        before = _copy(learner.encoder.state_dict())
        learner.scale_keys(1.0)
        torch.manual_seed(seed_of(f"seed {s.seed} key length"))
        episode, _ = self.objective.draw()
        with autocast(s.precision, self.device):
            assert isinstance(learner, KeyLearner)
            _, keys = learner.answers_and_keys(episode)  # as in a step: another shape would be compiled again
        learner.scale_keys(s.key_norm / self.ranks.mean(keys.detach().norm(dim=-1).mean()))
        learner.encoder.load_state_dict(before)  # batch norm has counted these tasks
        if self.ema is not None:
            self.ema.restart()

    def _loop(self) -> Visits:
        counters, ahead = self.counters, 0
        started = self._logged_at = time.monotonic()
        before = counters.seconds
        self._logged_step = counters.step
        while counters.step < self.settings.steps and self._done() < 1 and not self._stop:
            self._finetune_when_due()
            self._vary_shot()
            if self._encoder_is_apart:
                frozen = counters.step < self.settings.freeze_encoder_steps
                self.take_step.set_share(0, 0.0 if frozen else self.settings.encoder_lr_scale)
            self.take_step(counters.step, self._done())
            counters.step += 1
            validation_due = self._validation_is_due()
            waits = validation_due or counters.step % self.settings.log_every == 0
            ahead += 1
            if waits or ahead == STEPS_IN_A_VISIT:
                counters.side_by_side, ahead = max(counters.side_by_side, (yield waits) or 1), 0
            if waits:
                self._log()
                self._agree(before + time.monotonic() - started)
            if validation_due:
                self._validate()
            if waits and time.monotonic() - self._saved_at >= self.checkpoint_seconds:
                self.save()
            if not self.ranks.several:
                self._agree(before + time.monotonic() - started)

    def _finetune_when_due(self) -> None:
        """Towards the end, train on tasks as validation and test have them."""
        s = self.settings
        due = self._done() >= (s.steps - s.finetune_steps) / s.steps
        if due and self.objective.sampler is not self.finetune_sampler:
            self.objective.finetune(self.finetune_sampler)
            self.take_step.expect_change()

    def _vary_shot(self) -> None:
        """Where shots vary, draw those of the next step: a function of the seed and the step, as all that is drawn."""
        finetuning = self.settings.finetune_steps and self.objective.sampler is self.finetune_sampler
        if len(self._samplers) > 1 and not finetuning:
            number = seed_of(f"seed {self.settings.seed} shots of step {self.counters.step}") % len(self._samplers)
            self.objective.sampler = self._samplers[number]
            self.take_step.expect_change(number)

    def _agree(self, seconds: float) -> None:
        """Settle the clock, and whether to stop. Several ranks do so together, and only where they wait anyway."""
        self.counters.seconds = self.ranks.largest(seconds, self.device)
        asked_to_stop = self.request.asked or time.monotonic() > self._deadline
        self._stop = bool(self.ranks.largest(float(asked_to_stop), self.device))

    @property
    def _has_validated(self) -> bool:
        return self.counters.best_accuracy >= 0

    @property
    def out_of_time(self) -> bool:
        """Whether the seconds of the settings, if there is such a limit, are over."""
        return 0 < self.settings.seconds <= self.counters.seconds

    def _done(self) -> float:
        """The share of the run that is behind us: by steps or by the clock, whichever is ahead."""
        share = self.counters.step / self.settings.steps
        return max(share, self.counters.seconds / self.settings.seconds) if self.settings.seconds else share

    def _validation_is_due(self) -> bool:
        tasks, every = self.settings.tasks_per_step, self.settings.validate_every
        return self.counters.step * tasks // every > self.counters.validated_step * tasks // every

    def _log(self) -> None:
        """Report the steps since the last report; stop the run if one of them went wrong."""
        metrics, now, steps = self.take_step.metrics(), time.monotonic(), self.counters.step - self._logged_step
        loss, accuracy = mean_of_finite(metrics, self.counters.step, "step")
        rate = steps * self.settings.tasks_per_step / max(now - self._logged_at, 1e-9)
        losses = metrics[:, 0].tolist()
        self._write("train", loss=loss, accuracy=accuracy, tasks_per_second=rate, done=self._done(), losses=losses)
        self._logged_step, self._logged_at = self.counters.step, now

    def _validate(self) -> None:
        candidate = self._candidate()
        _require_finite(candidate, self.counters.step)
        accuracy = self._evaluate(candidate, "val").accuracy
        self.counters.validated_step = self.counters.step
        if accuracy > self.counters.best_accuracy or self.settings.train_on_validation:
            self.counters.best_accuracy, self.counters.best_step = accuracy, self.counters.step
            self.best = candidate
        self._write("validation", accuracy=accuracy, best=self.counters.best_accuracy)
        self._logged_at = time.monotonic()

    def _candidate(self) -> dict[str, Tensor]:
        """What would be kept if it were the best."""
        return _copy(self.learner.state_dict() if self.ema is None else self.ema.weights())

    def _test(self) -> Evaluation:
        self._write("testing", tasks=self.settings.test_tasks)
        result = self._evaluate(self.best, "test")
        self._write("test", accuracy=result.accuracy, ci95=result.ci95, tasks=self.settings.test_tasks)
        return result

    def _evaluate(self, weights: Weights, split: str) -> Evaluation:
        current = self.learner.state_dict()
        before = _copy(current)
        _fill(current, weights)
        result = evaluate(self.learner, self.items[split], self.evaluation_tasks[split], self.settings.precision)
        _fill(current, before)
        return result

    def _write(self, event: str, **values: Any) -> None:
        line = {"event": event, "step": self.counters.step, "seconds": round(self.counters.seconds, 3), **values}
        for sink in self.sinks:
            sink.write(line)

    def _vocabulary(self) -> dict[str, Any]:
        """What a model of sentences brings along: the word of each token, none for those that it must not know."""
        train = self.dataset.splits["train"]
        words = self.dataset.manifest.get("vocabulary")
        if not isinstance(train, TextItems) or not words:
            return {}
        hidden = train.visible.tolist()
        return {"vocabulary": [word if hidden[token] == token else "" for token, word in enumerate(words)]}

    def save(self) -> None:
        """Write the checkpoint, and the best model so far as a file of its own, never of NaN weights."""
        if self.folder is None or not self.ranks.first:
            return
        weights = {"best": self.best if self._has_validated else self._candidate()}
        for kept in (self.learner.state_dict(), *weights.values()):
            _require_finite(kept, self.counters.step)
        whole: dict[str, Weights] = {
            **weights,
            "model": self.learner.state_dict(),
            "optimizer": checkpoint.optimizer_tensors(self.take_step.optimizer),
        }
        if self.ema is not None:
            whole["average"] = self.ema.averages()
        if self.classifier is not None:
            whole["classifier"] = self.classifier.state_dict()
        for name, sections in ((MODEL, weights), (CHECKPOINT, whole)):
            path = self.folder / name
            counters = asdict(self.counters)
            use = self._vocabulary() if name == MODEL else {}
            about = self.learner_settings, self.settings.to_json(), counters, use
            files.save(path, sections, *about, keep_former=name == CHECKPOINT)
        self._owns_folder = True
        self._saved_at = time.monotonic()


def _require_finite(weights: Weights, step: int) -> None:
    """A step whose loss was a number may still have ruined the weights."""
    numbers = [tensor for tensor in weights.values() if tensor.is_floating_point() and tensor.numel()]
    largest = torch._foreach_norm(numbers, math.inf)  # of all at once: this stands between the steps of a run
    if not bool(torch.stack([one.float() for one in largest]).isfinite().all()):
        raise UserError(f"the weights are NaN or infinite at step {step}; resume with a lower learning rate.")


def _fill(weights: Weights, others: Weights) -> None:
    """Give weights the values of others: two kernels instead of one for each tensor."""
    for floats in (True, False):
        names = [name for name, tensor in weights.items() if tensor.is_floating_point() == floats]
        if names:
            torch._foreach_copy_([weights[name] for name in names], [others[name] for name in names])


def _copy(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def settings_for(learner: LearnerSettings | Learner, settings: TrainSettings, dataset: Dataset) -> LearnerSettings:
    """What a file says of a learner: its settings; of one that was not built from any, its class and its items."""
    known = learner if isinstance(learner, LearnerSettings) else learner.settings
    if known is not None:
        return known
    name, items = type(learner).__name__, dataset.item_shape
    return LearnerSettings(name, "", item_shape=items, vocabulary=dataset.vocabulary, slots=settings.slots)


def check_fit(learner: LearnerSettings, settings: TrainSettings, dataset: Dataset) -> None:
    """Refuse a training that its learner or its data do not allow."""
    if not dataset.vocabulary and learner.item_shape != dataset.item_shape:
        found, wanted = (" x ".join(map(str, shape)) for shape in (dataset.item_shape, learner.item_shape))
        raise UserError(f"{dataset.name} holds items of {found}, but the model is made for {wanted}.")
    if learner.slots < settings.slots:
        raise UserError(f"the model has {learner.slots} label slots, but tasks have up to {settings.slots} classes.")
    if dataset.vocabulary and (settings.augment or settings.class_augment):
        raise UserError(f"{dataset.name} holds texts; augment and class_augment are for images.")


def rate_of(s: TrainSettings) -> Rate:
    return Rate(s.learning_rate, s.schedule, s.steps / s.halve_every if s.schedule == "halving" else 0.0)


def capturable(learner: Learner) -> bool:
    return getattr(getattr(learner, "encoder", None), "capturable", True)


def accelerated(learner: Learner) -> Learner:
    """On a GPU: channels innermost in memory."""
    if next(learner.parameters(), torch.empty(0)).is_cuda:
        learner = learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return learner


def resume(
    folder: Path | str,
    dataset: Dataset,
    device: torch.device | str = "cpu",
    sinks: Sequence[Sink] = (),
    ranks: Ranks = ALONE,
    cache: EncoderCache | None = None,
    learner: Learner | None = None,
    items: Mapping[str, Items] | None = None,
    **changes: Any,
) -> Training:
    """A run as its checkpoint left it; `changes` of steps and seconds replace these settings.

    A learner that is not registered has to be given again.
    """
    folder = a_path("the folder of a run", folder)
    require("what it is trained on", dataset, Dataset, "a Dataset")
    saved = files.load(folder / CHECKPOINT)
    before = checkpoint.training_of(saved)
    fixed = sorted(set(changes) - {"steps", "seconds"})
    if fixed:
        raise UserError(f"{fixed[0]} cannot change in a resumed run; start a new one.")
    if changes.get("steps", math.inf) < saved.counters.get("step", 0):
        raise UserError(f"{saved.path} is at step {saved.counters['step']:,} already; give it more steps than that.")
    if before.data_hash != dataset.content_hash:
        raise UserError(f"{saved.path} was trained on other data than {dataset.full_name} is now; train it again.")
    built = files.built(saved) if learner is None else learner
    settings = replace(before, **changes)
    try:
        training = Training(built, settings, dataset, device, folder, sinks, ranks=ranks, cache=cache, items=items)
    except UserError as error:
        raise UserError(f"{saved.path}: {error}") from None
    training.restore(saved)
    return training
