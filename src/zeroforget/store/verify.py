"""Three proofs that nothing has moved: the files, the networks assembled from them, and what was measured of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroforget.data import Split
from zeroforget.files.hashes import sha256
from zeroforget.growing.dense import each_dense, fingerprint
from zeroforget.store import task_guess
from zeroforget.store.errors import Damaged
from zeroforget.store.folder import BORN, PROBE, SPREAD, Chain, Folder
from zeroforget.store.network import TOLERANCE, assemble, environment, preparation, probe_logits
from zeroforget.store.pictures import counted, held_out, list_pictures, pixels, read_pictures
from zeroforget.store.schema import VALUES, TaskFacts, interval
from zeroforget.store.trust import Trust, read_trust
from zeroforget.training import logits


@dataclass(frozen=True)
class Proof:
    """One of the three, and what was found."""

    title: str
    holds: bool
    found: str
    moved: tuple[str, ...] = ()
    """What is not as it was."""


@dataclass(frozen=True)
class Measured:
    """A task's accuracy on a folder of pictures."""

    task: str
    accuracy: float
    pictures: int
    recorded: float | None
    """What was written down when it was learned; None for a classifier that was adopted without pictures."""
    held_out: float | None
    """On the part that was held out when it was learned, if this is the folder it was learned from."""
    skipped: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where the accuracy on such pictures lies with 95 % confidence."""
        return interval(self.accuracy, self.pictures)

    @property
    def agrees(self) -> bool:
        """Whether the held-out part gives what was written down."""
        return self.held_out is None or self.held_out == self.recorded


@dataclass(frozen=True)
class Report:
    """What `verify` found: true if all is as it was.

    Example:
        >>> import torch, zeroforget
        >>> net = zeroforget.grow(torch.nn.Linear(8, 4), torch.randn(4, 8))
        >>> net.add_task("flowers", ["rose", "tulip"])
        >>> _ = net.save("garden", build="torch.nn:Linear", options={"in_features": 8, "out_features": 4})
        >>> model = zeroforget.open("garden", trust="torch.nn:Linear")
        >>> report = model.verify()
        >>> report.holds, len(report.proofs)
        (True, 3)
    """

    proofs: tuple[Proof, ...]
    head: str
    """The hash that stands for the whole model; empty if its files are damaged."""
    measured: tuple[Measured, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether all is as it was."""
        return all(proof.holds for proof in self.proofs) and all(one.agrees for one in self.measured)

    def __bool__(self) -> bool:
        return self.holds


MOST_PROBES = 64
FILES = "the files are those that were written"
NETWORK = "the networks assembled from them answer as they did"
STATE = "the newest signed state is part of it"
ACCURACY = "no task's accuracy can have changed"


def verify(folder: Folder, data: Mapping[str, Path] | None = None) -> Report:
    """Prove a model. Damage is told in the report; ModelError only if there is no model to speak of."""
    while True:
        seen = _seen(folder)
        report = _verify(folder, data or {})
        if report.holds or seen == _seen(folder):
            return report  # else a task was taken back meanwhile, which is no damage: look again


def _seen(folder: Folder) -> list[tuple[str, int]]:
    """The folders of tasks, and which ones of their names these are."""
    found = []
    for _, name in folder.entries():
        with contextlib.suppress(OSError):
            found.append((name, (folder.tasks / name).stat().st_ino))
    return found


def _verify(folder: Folder, data: Mapping[str, Path]) -> Report:
    try:
        chain = folder.read()
    except Damaged as error:
        return _broken([str(error)])
    report = prove_chain(folder, chain, [folder.task(task) for task in chain.tasks], data)
    try:
        return _not_rolled_back(read_trust(folder), chain, report)
    except Damaged as error:
        return _broken([str(error)])


def _not_rolled_back(trust: Trust, chain: Chain, report: Report) -> Report:
    """A model that takes signed updates must still have the state that the newest led to."""
    if not trust.head:
        return report
    held = trust.head in (chain.root, *(task.hash for task in chain.tasks))
    back = f"the model was at {trust.head[:16]}, signed on {trust.signed[:10]}, and is an earlier or another one now"
    proof = Proof(STATE, held, f"{trust.head[:16]}, signed on {trust.signed[:10]}", () if held else (back,))
    return replace(report, proofs=(*report.proofs, proof))


def prove_chain(folder: Folder, chain: Chain, places: Sequence[Path], data: Mapping[str, Path] | None = None) -> Report:
    """All three proofs of a chain whose tasks' files lie at `places`: in the folder, or aside and about to get in.

    In memory are the growing network, one task's own and one task's files, however many tasks there are.
    """
    tasks, wrong = list(zip(chain.tasks, places, strict=True)), []
    for task, place in tasks:
        try:
            for name in (BORN, PROBE, SPREAD):
                folder.tensors(place, task, name)
        except Damaged as error:
            wrong.append(str(error))
    if wrong:
        return _broken(wrong)
    files, links = 1 + sum(1 + len(task.files) for task in chain.tasks), counted(len(chain.tasks), "link")
    proofs = [Proof(FILES, True, f"{counted(files, 'file')}, each with the hash written down; {links} of the chain")]
    try:
        net = assemble(chain.model, tasks, folder.tensors, folder.path / "model.json")
        found = _Networks(environment(chain.model.backbone))  # asks a library, which may be missing
        for (task, place), dense in zip(tasks, each_dense(net), strict=True):
            task_guess.check(folder.tensors(place, task, SPREAD), dense, task.clusters, place / SPREAD)
            found.add(task, dense, folder.tensors(place, task, PROBE))
    except Damaged as error:
        return Report(
            (*proofs, Proof(NETWORK, False, "they cannot be assembled", (str(error),)), _unproved()), chain.head
        )
    proofs += [found.answers(), found.same_networks()]
    measured = []
    if data:
        chain.check_pictures()
    for name, at in (data or {}).items():
        task = chain.find(name)
        measured.append(measure(task, net.dense(task.number - 1), at))
    return Report(tuple(proofs), chain.head, tuple(measured))


def _broken(wrong: list[str]) -> Report:
    unproved = Proof(NETWORK, False, "not looked at, because the files are damaged")
    return Report((Proof(FILES, False, f"{len(wrong)} damaged", tuple(wrong)), unproved, _unproved()), "")


def _unproved() -> Proof:
    return Proof(ACCURACY, False, "not proved, because of the above")


class _Networks:
    """What is found of each task's own network, one after the other."""

    def __init__(self, here: Mapping[str, str]) -> None:
        self.here = here
        self.tasks = self.bits = self.numbers = 0
        self.moved: list[str] = []
        self.others: list[str] = []

    def add(self, task: TaskFacts, dense: nn.Module, probe: Mapping[str, Tensor]) -> None:
        """Look at one: does it answer its probe as it did, and is it the one whose accuracy was measured?"""
        self.tasks += 1
        self.numbers += sum(p.numel() for p in dense.state_dict().values())
        if (wrong := self._answer(task, dense, probe)) is not None:
            self.moved.append(f"task '{task.name}': {wrong}")
        if fingerprint(dense) != task.network:
            self.others.append(f"task '{task.name}': its network is not the one whose accuracy was measured")

    def _answer(self, task: TaskFacts, dense: nn.Module, probe: Mapping[str, Tensor]) -> str | None:
        stored, images = probe.get("logits"), probe.get("images")
        if stored is None or images is None or not _is_probe(images, task) or sha256(_bytes(stored)) != task.probe:
            return "its probe is not the one that was written down"
        try:
            now = probe_logits(dense, images, task.preprocessing)
            same, close = torch.equal(now, stored), _close(now, stored)
        except (RuntimeError, ValueError) as error:
            return f"its network does not run ({error})"
        if task.environment == self.here:
            self.bits += same
            return None if same else "its logits for the probe are other bits than when it was learned"
        return None if close else f"its logits for the probe are off by more than {TOLERANCE:g} of the largest"

    def answers(self) -> Proof:
        """Each task answers its probe as it did when it was learned."""
        elsewhere = self.tasks - self.bits - len(self.moved)
        found = f"{self.bits} of {self.tasks} tasks bit for bit"
        if elsewhere:
            found += f", {elsewhere} learned on another platform within {TOLERANCE:g} of the largest logit"
        return Proof(NETWORK, not self.moved, found, tuple(self.moved))

    def same_networks(self) -> Proof:
        """Each task's own network, tensor by tensor, is the one whose accuracy was measured: on any platform."""
        networks = counted(self.tasks, "network")
        found = f"every one of {self.numbers:,} numbers in {networks} is the one that was measured"
        return Proof(ACCURACY, not self.others, found, tuple(self.others))


def _is_probe(images: Tensor, task: TaskFacts) -> bool:
    """At least one input, as the network takes them: of none the answers are always right."""
    kind = torch.float32 if task.preprocessing.mode == VALUES else torch.uint8
    fits = images.dtype == kind and tuple(images.shape[1:]) == task.preprocessing.shape
    return fits and 1 <= len(images) <= MOST_PROBES


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes() if tensor.dtype == torch.float32 else b""


def _close(now: Tensor, stored: Tensor) -> bool:
    if now.shape != stored.shape:
        return False
    return bool((now - stored).abs().max() <= TOLERANCE * stored.abs().max().clamp_min(1e-3))


def measure(task: TaskFacts, dense: nn.Module, pictures: Path) -> Measured:
    """A task's accuracy on a folder of class folders, and on its held-out part if it was learned from there."""
    listing = list_pictures(pictures, task.classes)
    decoded = read_pictures(listing, task.preprocessing.shape)
    split = Split(decoded.images, decoded.labels)
    right = logits(dense, split, preparation(task.preprocessing)).argmax(1) == decoded.labels
    part = None
    whole = task.data.share == 1  # its test part came from a folder of its own
    aside = held_out(decoded.labels, task.data.share, task.data.seed)
    aside = (aside | whole).nonzero().squeeze(1)
    then = Split(decoded.images, decoded.labels[aside], aside)
    if pixels(then) == task.data.pixels:  # measured as it was then: the same pictures in the same batches
        scores = logits(dense, then, preparation(task.preprocessing))
        part = float((scores.argmax(1) == then.labels).sum()) / len(then)
    recorded = task.accuracy if task.measured else None
    skipped = len(decoded.unreadable) + len(listing.ignored)
    return Measured(task.name, float(right.double().mean()), len(right), recorded, part, skipped)
