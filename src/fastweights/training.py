"""The one training loop: draw tasks, step, validate now and then, keep the best, test once at the end."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights import checkpoint
from fastweights.data.items import Dataset
from fastweights.devices import find_device
from fastweights.distributed import ALONE, Ranks
from fastweights.encoders import ResNet
from fastweights.episodes import EpisodeSampler, EvaluationTasks, seed_of
from fastweights.errors import UserError
from fastweights.evaluation import Evaluation, evaluate
from fastweights.interrupts import StopRequest
from fastweights.learners import Learner, build_learner
from fastweights.learners.base import KeyLearner
from fastweights.learners.fast_weights import FastWeights
from fastweights.logs import Sink
from fastweights.objectives import MetaObjective, new_head
from fastweights.precision import autocast
from fastweights.pretraining import Pretraining, Progress, Shelf
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.settings_checks import check_fit, check_training
from fastweights.steps import Part, Rate, TrainStep, WeightAverage, mean_of_finite

Weights = Mapping[str, Tensor]
MODEL = checkpoint.MODEL
CHECKPOINT, LOG, PRETRAINED = "checkpoint.safetensors", "log.jsonl", "pretrained"
"""The files of a run's folder, and the folder in it of an encoder that was pre-trained for it alone."""
CHECKPOINT_SECONDS = 15.0
"""Checkpoints are written after a validation, but not more often than this."""


@dataclass
class Counters:
    """Where a run stands; everything besides tensors that a checkpoint must remember."""

    step: int = 0
    seconds: float = 0.0
    best_accuracy: float = -1.0
    best_step: int = 0
    validated_step: int = 0
    pretrained: bool = False

    @property
    def begun(self) -> bool:
        """Whether anything was done that a checkpoint would be missed for; pre-training half done is on the shelf."""
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
        learner_settings: LearnerSettings,
        settings: TrainSettings,
        dataset: Dataset,
        device: torch.device | str = "cpu",
        folder: Path | str | None = None,
        sinks: Sequence[Sink] = (),
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        ranks: Ranks = ALONE,
        shelf: Shelf | None = None,
    ) -> None:
        check_training(settings)
        device = find_device(device)
        is_text = bool(dataset.vocabulary)
        check_fit(learner_settings, settings, dataset.name, dataset.item_shape, is_text=is_text)
        settings = replace(settings, dataset=dataset.name, variant=dataset.variant, data_hash=dataset.content_hash)
        self.learner_settings, self.settings, self.dataset = learner_settings, settings, dataset
        self.folder = None if folder is None else Path(folder)
        self.sinks, self.checkpoint_seconds = list(sinks), checkpoint_seconds
        torch.manual_seed(seed_of(f"seed {settings.seed} weights"))
        self.learner = accelerated(build_learner(learner_settings).to(device)).train()
        if settings.key_length and not isinstance(self.learner, FastWeights):
            raise UserError("key_length is for learners with fast weights.")
        if settings.head_steps and not (self._above_encoder or settings.classify):
            raise UserError("--head-steps is for learners that learn something above their encoder.")
        self.items = {name: items.to(device) for name, items in dataset.splits.items()}
        if settings.train_on_validation:
            self.items["train"] = dataset.all_but_test().to(device)
        self.ranks, self.device = ranks, self.items["train"].device
        self.shelf = Shelf(self.folder / PRETRAINED) if shelf is None and self.folder is not None else shelf
        self.average = WeightAverage(self.learner, settings.average) if settings.average else None
        torch.manual_seed(seed_of(f"seed {settings.seed} pretraining"))
        self.head = (
            new_head(self.learner, self.items["train"]) if settings.pretrain_steps or settings.classify else None
        )
        sampler = self._sampler(*settings.training_task)
        self.objective = MetaObjective(self.learner, sampler, settings, ranks, self.classifier)
        as_asked = (settings.way, settings.shot, settings.queries)
        self.settled_sampler = self._sampler(*as_asked) if settings.settle_steps else sampler
        self.take_step = self._make_step()
        self.questions = {  # now rather than when they are asked: data too small for them shall fail before the work
            split: self._ask(split, tasks)
            for split, tasks in (("val", settings.validation_tasks), ("test", settings.test_tasks))
        }
        self.counters = Counters()
        self.best = _copy(self.learner.state_dict())
        self._saved_at = time.monotonic()
        self._logged_step, self._logged_at = 0, time.monotonic()
        self.request, self._stop = StopRequest(answered=ranks.first), False
        self._deadline = math.inf
        self._owns_folder = False

    def _make_step(self) -> TrainStep:
        s = self.settings
        return TrainStep(
            self.objective,
            self._parts(),
            Rate(s.learning_rate, s.schedule),
            seed=f"seed {s.seed}",
            weight_decay=s.weight_decay,
            optimizer=s.optimizer,
            device=self.device,
            average=self.average,
            graph=self._captures_graphs,
            ranks=self.ranks,
        )

    def _sampler(self, way: int, shot: int, queries: int) -> EpisodeSampler:
        """Draws training tasks of such a shape."""
        items = self.items["train"]
        if self.dataset.manifest.get("drop_small_classes"):  # rare words, say: of no use with so many shots
            if self.settings.classify:
                raise UserError(
                    f"classify wants every class in the tasks, but {self.dataset.name} leaves rare ones out."
                )
            items = items.with_at_least(shot + queries)
        try:
            return EpisodeSampler(items, way, shot, queries)
        except UserError as error:
            raise UserError(f"{self.dataset.full_name}, train split: {error}") from None

    @property
    def log_step(self) -> int | None:
        """From where on a log is to be written: None where there is nothing before it."""
        return self.counters.step if self.counters.begun else None

    @property
    def classifier(self) -> nn.Module | None:
        """The head of all training classes, where it is trained besides the learner."""
        return self.head if self.settings.classify else None

    def _parts(self) -> list[Part]:
        """What is trained: all at one rate, or the encoder, the first part, at its own."""
        besides = [] if self.classifier is None else list(self.classifier.parameters())
        if not self._encoder_is_apart:
            return [(1.0, [*self.learner.parameters(), *besides])]
        encoder = list(self.learner.encoder.parameters())
        return [(self.settings.encoder_rate, encoder), (1.0, [*self._above_encoder, *besides])]

    @property
    def _above_encoder(self) -> list[nn.Parameter]:
        of_encoder = {id(parameter) for parameter in self.learner.encoder.parameters()}
        return [parameter for parameter in self.learner.parameters() if id(parameter) not in of_encoder]

    @property
    def _encoder_is_apart(self) -> bool:
        return self.settings.encoder_rate != 1 or self.settings.head_steps > 0

    @property
    def _captures_graphs(self) -> bool:
        """Images only: the vendor's LSTM keeps random state of its own, which a graph would replay."""
        return self.device.type == "cuda" and not self.dataset.vocabulary

    def restore(self, saved: checkpoint.Saved) -> None:
        """Go on exactly where a checkpoint was written."""
        self._owns_folder = True
        checkpoint.fill(self.learner, saved.section("model"), saved.path)
        self.best = {name: t.to(self.device) for name, t in saved.section("best").items()}
        if self.classifier is not None:
            checkpoint.fill(self.classifier, saved.section("classifier"), saved.path)
        try:
            checkpoint.fill_optimizer(self.take_step.optimizer, saved.section("optimizer"))
            if self.average is not None:
                self.average.fill(saved.section("average"))
            self.counters = Counters(**saved.counters)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise UserError(f"{saved.path} is damaged or of another version ({error!r}); train anew.") from None

    def run(
        self,
        deadline: float = math.inf,
        *,
        test: bool = True,
        after_pretraining: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Train to the end, then answer the test tasks once with the best weights, unless told not to.

        Ctrl-C, the deadline (by `time.monotonic`), and too few `seconds` for pre-training interrupt: a checkpoint is
        written, to be resumed another time.
        """
        self._deadline, self._stop, self.request.asked = deadline, False, False
        if self.folder is not None and not self._owns_folder and self.ranks.first:
            require_free(self.folder)
        self._owns_folder = True
        with self.request.listening():
            if self.settings.pretrain_steps and not self.counters.pretrained:
                self.pretrain()
                if self.counters.pretrained:
                    after_pretraining()
            if self.counters.step == 0 and not self._stop:
                self._scale_keys()
            self._loop()
            if self.counters.step > self._logged_step:
                self._log()
            self.save()
            if not self._stop and (self.counters.validated_step < self.counters.step or not self._has_validated):
                self._validate()
                self.save()
            self._stop = bool(self.ranks.largest(float(self._stop or self.request.asked), self.device))
        return Outcome(self.counters, self._stop, self._test() if test and not self._stop else None)

    def pretrain(self) -> None:
        """Pre-train the encoder, from where the shelf has it: from nothing, half way or to the end."""
        assert self.head is not None
        untrained = {module: _copy(module.state_dict()) for module in (self.learner.encoder, self.head)}
        work = Pretraining(self.learner, self.head, self.items["train"], self.settings, graph=self._captures_graphs)
        before = 0.0 if self.shelf is None else self.shelf.take(work, self.learner_settings, self.settings)
        self.counters.seconds, started = before, time.monotonic()  # as if all of it had been trained here and now
        found_done = work.done

        def go_on(progress: Progress) -> bool:
            self._agree(before + time.monotonic() - started)
            self._write("pretrain", **asdict(progress))
            if time.monotonic() - self._saved_at >= self.checkpoint_seconds:
                self._shelve(work)
            self._stop |= self.out_of_time and not work.done  # an encoder half trained is no model to test
            return not self._stop

        work.run(go_on)
        if not found_done:
            self._shelve(work)
        if not work.done:
            for module, weights in untrained.items():  # the checkpoint shall not tell half of the story
                module.load_state_dict(weights)
            return
        for module in work.kept.values():
            self.ranks.follow_first(module.state_dict().values())  # each has pre-trained for itself
        if self.average is not None:
            self.average.restart()
        self.counters.pretrained = True

    def _shelve(self, work: Pretraining) -> None:
        for module in work.modules.values():
            _require_finite(module.state_dict(), work.step)
        if self.shelf is not None and self.ranks.first:
            self.shelf.put(work, self.learner_settings, self.settings, self.counters.seconds)
        self._saved_at = time.monotonic()

    def _scale_keys(self) -> None:
        """Let the layers above the encoder see keys of the length that is wanted: on average, in tasks of one step."""
        s, learner = self.settings, self.learner
        if not s.key_length:
            return
        assert isinstance(learner, FastWeights)
        before = _copy(learner.encoder.state_dict())
        learner.key_scale.fill_(1.0)
        torch.manual_seed(seed_of(f"seed {s.seed} key length"))
        episode, _ = self.objective.draw()
        with autocast(s.precision, self.device):
            _, keys = learner.answers_and_keys(episode)  # as in a step: another shape would be compiled anew
        learner.key_scale.copy_(s.key_length / self.ranks.mean(keys.detach().norm(dim=-1).mean()))
        learner.encoder.load_state_dict(before)  # batch norm has counted these tasks
        if self.average is not None:
            self.average.restart()

    def _loop(self) -> None:
        counters = self.counters
        started = self._logged_at = time.monotonic()
        before = counters.seconds
        self._logged_step = counters.step
        while counters.step < self.settings.steps and self._done() < 1 and not self._stop:
            self._settle_in_time()
            self._release_encoder_in_time()
            self.take_step(counters.step, self._done())
            counters.step += 1
            validation_due = self._validation_is_due()
            if validation_due or counters.step % self.settings.log_every == 0:
                self._log()
                self._agree(before + time.monotonic() - started)
            if validation_due:
                self._validate()
                self._save_now_and_then()
            if not self.ranks.several:
                self._agree(before + time.monotonic() - started)

    def _settle_in_time(self) -> None:
        """Towards the end, ask as validation and test do."""
        s = self.settings
        due = self._done() >= (s.steps - s.settle_steps) / s.steps
        if due and self.objective.sampler is not self.settled_sampler:
            self.objective.settle(self.settled_sampler)
            self.take_step.expect_change()

    def _release_encoder_in_time(self) -> None:
        """Let the encoder learn, too, once the layers above it have had their first steps alone."""
        if self._encoder_is_apart:
            alone = self.counters.step < self.settings.head_steps
            self.take_step.set_share(0, 0.0 if alone else self.settings.encoder_rate)

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
        return _copy(self.learner.state_dict() if self.average is None else self.average.weights())

    def _test(self) -> Evaluation:
        self._write("testing", tasks=self.settings.test_tasks)
        result = self._evaluate(self.best, "test")
        self._write("test", accuracy=result.accuracy, ci95=result.ci95, tasks=self.settings.test_tasks)
        return result

    def _ask(self, split: str, tasks: int) -> EvaluationTasks:
        s = self.settings
        return EvaluationTasks(self.dataset, split, way=s.way, shot=s.shot, queries=s.queries, tasks=tasks)

    def _evaluate(self, weights: Weights, split: str) -> Evaluation:
        current = _copy(self.learner.state_dict())
        self.learner.load_state_dict(weights)
        result = evaluate(self.learner, self.items[split], self.questions[split], self.settings.precision)
        self.learner.load_state_dict(current)
        return result

    def _write(self, event: str, **values: Any) -> None:
        line = {"event": event, "step": self.counters.step, "seconds": round(self.counters.seconds, 3), **values}
        for sink in self.sinks:
            sink.write(line)

    def _save_now_and_then(self) -> None:
        if time.monotonic() - self._saved_at >= self.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        """Write the checkpoint, and the best model so far as a file of its own, never of what is no numbers."""
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
        if self.average is not None:
            whole["average"] = self.average.averages()
        if self.classifier is not None:
            whole["classifier"] = self.classifier.state_dict()
        for name, sections in ((MODEL, weights), (CHECKPOINT, whole)):
            path = self.folder / name
            checkpoint.save(path, sections, self.learner_settings, self.settings, asdict(self.counters))
        self._owns_folder = True
        self._saved_at = time.monotonic()


def require_free(folder: Path) -> None:
    """Refuse a folder that holds a run: its checkpoint would be overwritten."""
    if (folder / CHECKPOINT).exists():
        raise UserError(f"{folder} already holds a run; go on with --resume --out {folder}, or choose another --out.")


def _require_finite(weights: Weights, step: int) -> None:
    """A step whose loss was a number may still have ruined the weights."""
    numbers = [tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point()]
    if not bool(torch.stack(numbers).all()):
        raise UserError(
            f"the weights are not numbers at step {step}: nothing after the last checkpoint was kept; try "
            "a lower --learning-rate."
        )


def _copy(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def accelerated(learner: Learner) -> Learner:
    """On a GPU: channels innermost in memory, and a ResNet's many small operations fused by the compiler.

    The CNN has kernels of its own, the LSTM the vendor's, and MAML's encoder is called within `vmap`.
    """
    if next(learner.parameters(), torch.empty(0)).is_cuda:
        learner = learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if isinstance(learner, KeyLearner) and isinstance(learner.encoder, ResNet):
            learner.encoder.compile(dynamic=False)
    return learner


def resume(
    folder: Path | str,
    dataset: Dataset,
    device: torch.device | str = "cpu",
    sinks: Sequence[Sink] = (),
    ranks: Ranks = ALONE,
    shelf: Shelf | None = None,
    **changes: Any,
) -> Training:
    """A run as its checkpoint left it; `changes` of steps and seconds replace these settings.

    Of a run that had come to its end, with more steps, the weights of that end may still turn out the best.
    """
    folder = Path(folder)
    saved = checkpoint.load(folder / CHECKPOINT)
    fixed = sorted(set(changes) - {"steps", "seconds"})
    if fixed:
        raise UserError(f"{fixed[0]} cannot change in a resumed run; start a new one.")
    if changes.get("steps", math.inf) < saved.counters.get("step", 0):
        raise UserError(f"{saved.path} is at step {saved.counters['step']:,} already; give it more steps than that.")
    if saved.training.data_hash != dataset.content_hash:
        raise UserError(f"{saved.path} was trained on other data than {dataset.full_name} is now; train it anew.")
    settings = replace(saved.training, **changes)
    training = Training(saved.learner, settings, dataset, device, folder, sinks, ranks=ranks, shelf=shelf)
    training.restore(saved)
    return training
