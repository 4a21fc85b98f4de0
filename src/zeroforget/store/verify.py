"""Three proofs that nothing has moved: the files, the networks assembled from them, and what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroforget.data import Split
from zeroforget.files.hashes import sha256
from zeroforget.growing.fingerprint import fingerprint
from zeroforget.growing.network import GrowingNetwork
from zeroforget.store import task_guess as which
from zeroforget.store.errors import Damaged
from zeroforget.store.folder import BORN, PROBE, SPREAD, Chain, Folder
from zeroforget.store.network import TOLERANCE, assemble, environment, preparation, probe_logits
from zeroforget.store.pictures import counted, held_out, list_pictures, pixels, read_pictures
from zeroforget.store.schema import TaskFacts
from zeroforget.store.trust import Trust, read_trust
from zeroforget.training import logits
from zeroforget.training.evaluate import interval


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
    """What `verify` found."""

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
        entries = folder.entries()
        report = _verify(folder, data or {})
        if report.proofs[0].holds or entries == folder.entries():
            return report  # else a task was taken back meanwhile, which is no damage: look again


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
    """All three proofs of a chain whose tasks' files lie at `places`: in the folder, or aside and about to get in."""
    contents: list[tuple[TaskFacts, dict[str, Tensor], Path]] = []
    probes: list[dict[str, Tensor]] = []
    spreads: list[dict[str, Tensor]] = []
    wrong = []
    for task, place in zip(chain.tasks, places, strict=True):
        try:
            contents.append((task, folder.tensors(place, task, BORN), place))
            probes.append(folder.tensors(place, task, PROBE))
            spreads.append(folder.tensors(place, task, SPREAD))
        except Damaged as error:
            wrong.append(str(error))
    if wrong:
        return _broken(wrong)
    files, links = 1 + sum(1 + len(task.files) for task in chain.tasks), counted(len(chain.tasks), "link")
    proofs = [Proof(FILES, True, f"{counted(files, 'file')}, each with the hash written down; {links} of the chain")]
    try:
        net = assemble(chain.model, contents, folder.path / "model.json")
        dense = [net.dense(index) for index in range(len(chain.tasks))]
        for (task, _, place), one, about in zip(contents, dense, spreads, strict=True):
            which.check(about, one, task.clusters, place / SPREAD)
    except Damaged as error:
        return Report(
            (*proofs, Proof(NETWORK, False, "they cannot be assembled", (str(error),)), _unproved()), chain.head
        )
    proofs += [_answers(chain, dense, probes), _same_networks(chain, dense, net)]
    measured = tuple(
        measure(chain.find(name), dense[chain.find(name).number - 1], at) for name, at in (data or {}).items()
    )
    return Report(tuple(proofs), chain.head, measured)


def _broken(wrong: list[str]) -> Report:
    unproved = Proof(NETWORK, False, "not looked at, because the files are damaged")
    return Report((Proof(FILES, False, f"{len(wrong)} damaged", tuple(wrong)), unproved, _unproved()), "")


def _unproved() -> Proof:
    return Proof(ACCURACY, False, "not proved, because of the above")


def _answers(chain: Chain, dense: list[nn.Module], probes: list[dict[str, Tensor]]) -> Proof:
    here, moved, bits = environment(chain.model.backbone), [], 0
    for task, one, probe in zip(chain.tasks, dense, probes, strict=True):
        stored, images = probe.get("logits"), probe.get("images")
        if stored is None or images is None or not _is_probe(images, task) or sha256(_bytes(stored)) != task.probe:
            moved.append(f"task '{task.name}': its probe is not the one that was written down")
            continue
        try:
            now = probe_logits(one, images, task.preprocessing)
            same, close = torch.equal(now, stored), _close(now, stored)
        except (RuntimeError, ValueError) as error:
            moved.append(f"task '{task.name}': its network does not run ({error})")
            continue
        if task.environment == here:
            bits += same
            if not same:
                moved.append(f"task '{task.name}': its logits for the probe are other bits than when it was learned")
        elif not close:
            moved.append(
                f"task '{task.name}': its logits for the probe are off by more than {TOLERANCE:g} of the largest"
            )
    elsewhere = len(chain.tasks) - bits - len(moved)
    found = f"{bits} of {len(chain.tasks)} tasks bit for bit"
    if elsewhere:
        found += f", {elsewhere} learned on another platform within {TOLERANCE:g} of the largest logit"
    return Proof(NETWORK, not moved, found, tuple(moved))


def _is_probe(images: Tensor, task: TaskFacts) -> bool:
    """At least one picture, as the network takes them: of none the answers are always right."""
    fits = images.dtype == torch.uint8 and tuple(images.shape[1:]) == task.preprocessing.shape
    return fits and 1 <= len(images) <= MOST_PROBES


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes() if tensor.dtype == torch.float32 else b""


def _close(now: Tensor, stored: Tensor) -> bool:
    if now.shape != stored.shape:
        return False
    return bool((now - stored).abs().max() <= TOLERANCE * stored.abs().max().clamp_min(1e-3))


def _same_networks(chain: Chain, dense: list[nn.Module], net: GrowingNetwork) -> Proof:
    """Each task's own network, tensor by tensor, is the one whose accuracy was measured: on any platform."""
    moved = [
        f"task '{task.name}': its network is not the one whose accuracy was measured"
        for task, one in zip(chain.tasks, dense, strict=True)
        if fingerprint(one) != task.network
    ]
    numbers = sum(p.numel() for one in dense for p in one.state_dict().values())
    found = f"every one of {numbers:,} numbers in {counted(len(dense), 'network')} is the one that was measured"
    return Proof(ACCURACY, not moved, found, tuple(moved))


def measure(task: TaskFacts, dense: nn.Module, pictures: Path) -> Measured:
    """A task's accuracy on a folder of class folders, and on its held-out part if it was learned from there."""
    listing = list_pictures(pictures, task.classes)
    channels = 3 if task.preprocessing.mode == "RGB" else 1
    decoded = read_pictures(listing, (channels, *task.preprocessing.size))
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
