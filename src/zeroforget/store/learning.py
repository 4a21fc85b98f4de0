"""Learning a task into a model's folder: said before it begins, resumed after a kill, written at once or not at all."""

from __future__ import annotations

import copy
import math
import shutil
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroforget._version import __version__
from zeroforget.data import Split
from zeroforget.files import atomic
from zeroforget.files.hashes import sha256
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods.lean import Lean, within_budget
from zeroforget.methods.tfm import Candidate, Tfm
from zeroforget.nets import Shape, libraries
from zeroforget.processes import current
from zeroforget.progress import Epoch
from zeroforget.proving.grow import grow
from zeroforget.store import task_guess
from zeroforget.store.backbone import Backbone
from zeroforget.store.confusions import noted
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import BORN, MODEL, PROBE, SPREAD, TASK, Chain, Folder
from zeroforget.store.frozen_features import (
    CROSS_VALIDATION,
    ENOUGH,
    FOLDS,
    Added,
    TaskFeatures,
    cross_validated,
    fit_newest,
    folds,
    judge_head,
    on_frozen,
    place,
    pool,
    pooled,
)
from zeroforget.store.interrupted import begin, end, shared
from zeroforget.store.names import folder_name, next_version, task_name
from zeroforget.store.network import (
    Addition,
    addition,
    assemble_chain,
    environment,
    example,
    fresh_values,
    load_weights,
    operations,
    plain_network,
    preparation,
    probe_logits,
    prove,
)
from zeroforget.store.options import Options
from zeroforget.store.pictures import (
    ClassFolders,
    Lesson,
    check,
    check_apart,
    lesson,
    list_pictures,
    pixels,
    read_pictures,
)
from zeroforget.store.schema import Calibration, ModelFacts, TaskFacts, text_of
from zeroforget.store.starting import (
    FROZEN,
    Classifier,
    Given,
    Normalization,
    Start,
    backbone_of,
    grown_from,
    library_start,
    normalization,
    resolved,
)
from zeroforget.store.tensors import born
from zeroforget.store.writing import Watch, changing
from zeroforget.training import Diverged, Fit, FitLog, logits
from zeroforget.training.checkpoint import DamagedCheckpoint
from zeroforget.training.evaluate import BATCH
from zeroforget.training.seeding import seeded

MOST_EPOCHS = 500
"""So many epochs of a training are written down, the last ones."""
LESS = 0.99
"""What a task adds to frozen features must bring the loss on the selection part below this share of their head's.

Accuracy on a few pictures would be a poor judge: on 40 photos a class it took the worse network in 2 of 8 trials.
"""
PROBES = 4
"""Held-out pictures kept with a task, to prove its logits by."""


def learn(path: Path, pictures: Path, name: str, options: Options, watch: Watch) -> TaskFacts:
    """Learn a task from a folder of class folders; the model is made if there is none.

    Where torch.distributed has joined several processes, each calls this, and the first one writes.
    """
    name, folder = task_name(name), Folder(path)
    watch = watch if current().first else Watch()
    check_apart(path, pictures)
    folder.check_place()
    with ExitStack() as stack:
        chain = folder.read() if folder.exists() or folder.entries() else None
        if chain is not None:
            chain.check_pictures()
        if options.again:
            name = next_version(name, [task.name for task in chain.tasks] if chain else ())
        return _learn(folder, chain, pictures, name, options, resolved(options, chain, stack), watch)


def _learn(
    folder: Folder, chain: Chain | None, pictures: Path, name: str, asked: Options, options: Options, watch: Watch
) -> TaskFacts:
    backbone, classifier = backbone_of(chain, options, name), None
    listing = list_pictures(pictures)
    if chain is None and libraries.is_foreign(backbone.network):
        classifier = library_start(options)
        backbone = classifier.backbone
    elif options.weights is not None:  # a file that does not fit is told at once
        load_weights(plain_network(backbone, options.seed), backbone, options.weights)
    given = (classifier.mean, classifier.std) if classifier else normalization(options, backbone.shape[0])
    ready = lesson_of(listing, backbone.shape, name, options, watch, Start.of(chain), given)
    with ExitStack() as held:
        current().by_first(lambda: held.enter_context(changing(folder, watch)))
        before, chain = chain, folder.read() if folder.exists() else None
        if before is None and chain is not None:  # what was taken by default was for a model of its own
            options, classifier, given = asked, None, None
        own = backbone if classifier and chain is None else backbone_of(chain, options, name)
        if own.shape != backbone.shape:
            watch.say("another process has made the model meanwhile, for other pictures; reading them again")
            ready = lesson_of(listing, own.shape, name, options, watch, Start.of(chain), given)
        if chain is None:
            watch.say(f"making a new model in {folder.path}")
        return Learning(folder, chain, own, ready, options, watch, classifier).run()


def lesson_of(
    listing: ClassFolders,
    shape: Shape,
    name: str,
    options: Options,
    watch: Watch,
    start: Start | None = None,
    given: Normalization | None = None,
) -> Lesson:
    """The pictures as the network takes them; what is wrong with them is said."""
    decoded = read_pictures(listing, shape, told=watch.decoding)
    for note in check(decoded, strict=options.strict, unreadable=options.unreadable):
        watch.say(note)
    shift = shape[1] // 16 if options.shift is None else options.shift
    test = None
    if options.test is not None:
        test = read_pictures(list_pictures(options.test, listing.classes), shape, told=watch.decoding)
        if len(test.labels) == 0:
            raise ModelError(f"none of the pictures below {options.test} can be read")
    ready = lesson(
        name, decoded, share=options.held_out, seed=options.seed, flip=_flips(options, shape, start), shift=shift,
        selection=options.selection, test=test, normalized=start.normalization if start else given,
    )  # fmt: skip
    for note in ready.notes:
        watch.say(note)
    named = ", ".join([*listing.classes[:5], *(["…"] if len(listing.classes) > 5 else [])])
    parts = (
        f"{len(ready.task.train)} pictures to learn from, {ready.selected} to select by, {len(ready.task.test)} to test"
    )
    watch.say(f"{len(listing.classes)} classes ({named}): {parts}")
    return ready


def _flips(options: Options, shape: Shape, start: Start | None) -> bool:
    """Of a head alone that doubles the time, and made no difference on photos (`benchmarks/photos.py`)."""
    if options.flip is not None:
        return options.flip
    return start is not None and start.frozen and options.adds and shape[0] == 3


class Learning:
    """One task on its way into the folder; the lock is held."""

    def __init__(
        self,
        folder: Folder,
        chain: Chain | None,
        backbone: Backbone,
        ready: Lesson,
        options: Options,
        watch: Watch,
        classifier: Classifier | None = None,
    ) -> None:
        self.folder, self.chain, self.ready, self.options, self.watch = folder, chain, ready, options, watch
        self.origin = classifier
        self.features: TaskFeatures | None = None
        first = Start.of(chain)
        self.start = first or (
            None
            if options.weights is None
            else Start(options.frozen is not False, (ready.preprocessing.mean, ready.preprocessing.std))
        )
        self.number = len(chain.tasks) + 1 if chain else 1
        self.backbone, self.keeps = backbone, True
        self.weights: str | None = None
        self.model, self.net = self._start()
        self.content = b"" if chain else text_of(self.model, folder.path / MODEL)
        self.candidates = self._possible()

    def run(self) -> TaskFacts:
        """Learn it and write it down."""
        net, log = self.learn()
        return current().by_first(lambda: self.write(net, log))

    def learn(self) -> tuple[GrowingNetwork, FitLog]:
        """The network that knows the task, and how that came."""
        self.additions = self._different()
        self.candidates = tuple(Candidate(one.growth, one.rank) for one in self.additions)
        self.watch.adds(self.additions)
        before = copy.deepcopy(self.net) if self.options.folds else None
        net, log = self._learned()
        if (found := self._cross_validated(before, net, log)) is not None:
            log.notes[CROSS_VALIDATION] = found
        return net, log

    def _learned(self) -> tuple[GrowingNetwork, FitLog]:
        """The network, of whatever kind the task is."""
        if self.start is not None and self.start.frozen:
            return self._on_frozen()
        grower = Lean(self.net, example(self.backbone), **self._growing()).to(self.options.device)
        log = self._train(grower)
        grower.to("cpu")
        return grower.net, log

    def _growing(self) -> dict[str, Any]:
        """How the method is to grow."""
        tried = self.candidates if len(self.candidates) > 1 else ()
        margin = self.options.margin if self.options.budget is None else 0.0
        first = self.candidates[0]
        return {
            "start": self.backbone.start, "growth": first.growth, "rank": first.rank, "pairs": tried, "margin": margin
        }  # fmt: skip

    def _on_frozen(self) -> tuple[GrowingNetwork, FitLog]:
        """A head on features that all are there; or what the task adds to them, if that does better."""
        task, options = self.ready.task, self.options
        adds = bool(self.net.history) and options.adds
        self.watch.say(f"the features are frozen: computing those of {len(task.train) + len(task.val)} pictures once")
        with seeded("learn", options.seed, self.number):
            plain = copy.deepcopy(self.net) if adds else self.net
            growth = 0.0 if adds else self.candidates[0].growth
            fitted = on_frozen(plain, self.ready, growth, device=options.device)
        self.features = fitted.features
        if not adds:
            return fitted.net, fitted.log
        grower = Added(self.net, example(self.backbone), fitted.head, **self._growing()).to(options.device)
        log = self._train(grower)
        grower.to("cpu")
        features = TaskFeatures(grower.net.eval(), self.ready, options.device)
        before, after = fitted.head, fit_newest(features, self.ready)
        if after.loss < LESS * before.loss:
            self.features = features
            place(grower.net, after.weight, after.bias)
            log.notes["head"] = after.accuracy
            return grower.net, log
        self.watch.say(
            f"it does no better than the frozen features ({100 * after.accuracy:.1f} % of the selection pictures at a "
            f"loss of {after.loss:.2f}, they {100 * before.accuracy:.1f} % at {before.loss:.2f}): the task adds a head "
            "alone"
        )
        return fitted.net, replace(fitted.log, seconds=fitted.log.seconds + log.seconds)

    def _cross_validated(
        self, before: GrowingNetwork | None, net: GrowingNetwork, log: FitLog
    ) -> dict[str, Any] | None:
        """Every picture tested by a network that learned from the others, where that is asked for or takes no time."""
        options, task, share = self.options, self.ready.task, self.options.selection
        alone = self.start is not None and self.start.frozen and len(log.epochs) == 1 and not log.notes
        if options.folds == 0 or (options.folds is None and (not alone or len(task.test) >= ENOUGH)):
            return None
        every = pool(self.ready)
        parts = folds(every, options.folds or FOLDS, options.seed)
        if alone:
            assert self.features is not None
            values = torch.cat([self.features.of(part) for part in pooled(self.ready)])
            known = Split(values, every.labels, torch.arange(len(every)))
            return cross_validated(known, parts, options.seed, share, judge_head)
        assert before is not None

        def judge(train: Split, val: Split, test: Split) -> int:
            other = copy.copy(self)
            other.net, other.watch, other.keeps = copy.deepcopy(before), Watch(training=self.watch.training), False
            other.ready = replace(self.ready, task=replace(task, train=train, val=val, test=test))
            learned, _ = other._learned()
            scores = logits(learned.dense(self.number - 1), test, preparation(self.ready.preprocessing))
            return int((scores.argmax(1) == test.labels).sum())

        self.watch.say(f"cross-validation: the task is learned {len(parts.unique())} times more, to test every picture")
        return cross_validated(every, parts, options.seed, share, judge)

    def write(self, net: GrowingNetwork, log: FitLog) -> TaskFacts:
        """The task becomes a part of the folder."""
        facts = self._write(net, log)
        end(self.folder.path, facts.name)
        return facts

    def _start(self) -> tuple[ModelFacts, GrowingNetwork]:
        """The network as it stands, or a new one that is proved to grow."""
        chain, folder = self.chain, self.folder
        if chain is None and self.origin is not None and self.options.weights is not None:
            given = Given(self.options.weights)
            model, net = grown_from(self.origin, given, folder.path, now(), self.options.seed, self.watch)
            self.weights, self.backbone = model.weights, model.backbone
            return model, net
        if chain is not None and (chain.tasks or self.options.weights is None):
            return chain.model, assemble_chain(folder, chain)
        plain = plain_network(self.backbone, chain.model.seed if chain else self.options.seed)
        self.weights = (
            None if self.options.weights is None else load_weights(plain, self.backbone, self.options.weights)
        )
        backbone = self.backbone
        net = grow(plain, example(backbone), **backbone.growing())
        made, program = now(), f"zeroforget {__version__}"
        model = ModelFacts(backbone, self.options.seed, made, program, self.weights, fresh_values(net))
        if chain is not None:
            model = chain.model  # model.json never changes; its spreads are close enough for other weights
        return model, net

    def _possible(self) -> tuple[Candidate, ...]:
        """The growths and ranks to try, none beyond what is left."""
        options = self.options
        if not self.net.history:
            return (Candidate(self.backbone.start),)
        left = max(0.0, self.net.left())
        if isinstance(options.budget, int):
            return tuple(within_budget(self.net, options.budget, left))
        if self.start is not None and self.start.frozen and options.growth is None:
            return (Candidate(0.0, options.rank),)
        growths = tuple(sorted({min(g, left) for g in options.growths}))
        if growths[-1] < max(options.growths):
            self.watch.say(f"the network is near its limit: it can grow by {left:.3g} of its full width")
        return tuple(Candidate(growth, options.rank) for growth in growths)

    def _different(self) -> list[Addition]:
        """What each candidate adds; of growths that add the same features the smallest stands for all."""
        found: dict[Any, Addition] = {}
        for growth, rank in self.candidates:
            one = addition(self.net, self.ready, growth, rank)
            first = found.setdefault((*one.features.values(), rank), one)
            if first is not one:
                self.watch.say(f"a growth of {growth:g} adds the same features as {first.growth:g} and is not tried")
        return list(found.values())

    def _train(self, grower: Tfm) -> FitLog:
        if not self.keeps:
            return self._fit(grower, None)
        plan, finish = self._plan(), self.options.finish
        training = current().by_first(lambda: begin(self.folder.path, plan, finish=finish, watch=self.watch))
        try:
            return self._fit(grower, training)
        except (DamagedCheckpoint, KeyError) as error:
            shutil.rmtree(training, ignore_errors=True)
            raise ModelError(
                f"what was kept of an interrupted training is damaged ({error}) and was removed; learn again to start "
                "over. The model is as it was"
            ) from error

    def _fit(self, grower: Tfm, training: Path | None) -> FitLog:
        regime = self.options.regime(added=isinstance(grower, Added))
        fit = Fit(regime, self.options.seed, self.watch.training, training)
        try:
            with seeded("learn", self.options.seed, self.number):
                return grower.learn(self.ready.task, fit)
        except Diverged as error:
            lower = min(regime.lr / 10, 0.02)
            raise Diverged(
                f"training '{self.ready.task.name}' diverged at --lr {regime.lr:g}: its loss is no number any "
                f"more. Try a lower one, such as --lr {lower:g}. The model is as it was"
            ) from error

    def _plan(self) -> dict[str, Any]:
        """What an interrupted training must share with this one to be gone on with."""
        options = shared(self.options, current().world)
        return {
            "task": self.ready.task.name,
            "model": self.chain.head if self.chain else "",
            "backbone": str(self.backbone),
            "weights": self.weights,
            "pictures": [pixels(self.ready.task.train), pixels(self.ready.task.val), self.ready.data.pixels],
            "options": options,
        }

    def _write(self, net: GrowingNetwork, log: FitLog) -> TaskFacts:
        """Written aside, read back, measured as read back, and only then given its name."""
        name, index = self.ready.task.name, self.number - 1
        folder = self.folder
        chain = self.chain or Chain(self.model, sha256(self.content), ())
        aside = folder.aside(folder_name(self.number, name))
        tensors = born(net, index)
        written = {BORN: folder.write_tensors(aside, BORN, tensors)}
        images = self._probes()
        logits_ = probe_logits(net.dense(index), images, self.ready.preprocessing)
        written[PROBE] = folder.write_tensors(aside, PROBE, {"images": images, "logits": logits_})
        before = net.widths(index - 1) if index else dict.fromkeys(net.axes.sizes, 0)
        facts = TaskFacts(
            number=self.number,
            name=name,
            before=chain.head,
            learned=now(),
            program=f"zeroforget {__version__}",
            classes=self.ready.task.classes,
            growth=net.history[index].growth,
            rank=net.history[index].rank,
            born={axis: width - before[axis] for axis, width in net.widths(index).items()},
            weights=sum(t.numel() for t in tensors.values()),
            operations=operations(net.dense(index), net.shape),
            preprocessing=self.ready.preprocessing,
            accuracy=0.0,
            data=self.ready.data,
            training=self._summary(log),
            calibration=Calibration(1.0, (0.0, 0.0)),
            network=net.fingerprint(index),
            probe=sha256(logits_.numpy().tobytes()),
            environment=environment(self.backbone),
            files=written,
        )
        facts = self._measure(prove(folder, chain, [(facts, aside)])[-1], facts, aside)
        content = text_of(facts, folder.task(facts) / TASK)
        atomic.write_new(aside / TASK, content)
        if not folder.exists():
            folder.create(self.content)
        folder.commit(aside, facts.folder)
        return replace(facts, hash=sha256(content))

    def _measure(self, dense: nn.Module, facts: TaskFacts, aside: Path) -> TaskFacts:
        """Accuracy and calibration of the network as it will be read, and the file that tells its pictures apart."""
        task, prepare = self.ready.task, preparation(facts.preprocessing)
        tested = logits(dense.get_submodule("features"), task.test, prepare)
        scores = torch.cat([dense.get_submodule("head")(part) for part in tested.split(BATCH)])
        right = float((scores.argmax(1) == task.test.labels).sum()) / len(task.test)
        rows, frozen = task_guess.sampled(len(task.train)), self.start is not None and self.start.frozen
        if self.features is not None and self.options.device == "cpu":  # another device rounds otherwise
            values = self.features.of(task.train)[rows].double()
        else:
            values = task_guess.features(dense, task.train, prepare)
        about = task_guess.spread(values, task.train.labels[rows], len(facts.classes), unit=frozen)
        tested = tested[task_guess.sampled(len(tested))].double()
        far = task_guess.quantiles(task_guess.distance(tested, about))
        written = {**facts.files, SPREAD: self.folder.write_tensors(aside, SPREAD, about)}
        calibration = Calibration(task_guess.temperature(scores, task.test.labels), far)
        told = {**facts.training, "test": noted(scores, task.test.labels, len(facts.classes))}
        return replace(facts, accuracy=right, calibration=calibration, training=told, files=written)

    def _probes(self) -> torch.Tensor:
        """Test pictures, as far apart as they lie."""
        test = self.ready.task.test
        rows = torch.linspace(0, len(test) - 1, min(PROBES, len(test))).long()
        return test.batch(rows)[0].clone()

    def _summary(self, log: FitLog) -> dict[str, Any]:
        told = {"epochs": len(log.epochs), "kept": log.best, "seconds": round(log.seconds, 2), "stopped": log.stopped}
        if self.ready.selected and log.epochs:
            right = log.notes.get("head", log.val_accuracy)
            told["selection"] = {"pictures": self.ready.selected, "accuracy": right}
        if CROSS_VALIDATION in log.notes:
            told[CROSS_VALIDATION] = log.notes[CROSS_VALIDATION]
        if "head" in log.notes:
            told["refitted"] = True
        told["curve"] = [_point(epoch) for epoch in log.epochs[-MOST_EPOCHS:]]
        if self.start is not None:
            told[FROZEN] = self.start.frozen
        return told | ({"search": log.notes["search"]} if "search" in log.notes else {})


def _point(epoch: Epoch) -> list[float]:
    """An epoch as the report draws it: loss, loss and accuracy on the selection part."""
    loss = [round(value, 4) if math.isfinite(value) else 0.0 for value in (epoch.loss, epoch.val_loss)]
    return [*loss, round(epoch.val_accuracy, 4)]


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
