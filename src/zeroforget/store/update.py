"""An update: what was born since some task, in one file that fits exactly the model which ends with that task.

A line that says what it is, the length of a sealed JSON header in eight bytes, the header, and the files it lists, end
to end.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from zeroforget.files import atomic
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import MOST_BYTES, Fields, sealed
from zeroforget.files.paths import open_regular
from zeroforget.store.errors import Damaged, ModelError, damage_told
from zeroforget.store.folder import BORN, MODEL, PROBE, SPREAD, TASK, Chain, Folder
from zeroforget.store.schema import VERSION, ModelFacts, TaskFacts, read_bytes, unsealed
from zeroforget.store.trust import Key, Signature, check_origin, read_signature, read_trust, received, sign, write_trust
from zeroforget.store.verify import prove_chain
from zeroforget.store.writing import Watch, changing, check_output, output

MAGIC = b"zeroforget update\n"
SIGNED = b"zeroforget signed update\n"
"""How a signed one begins: then come a length, the signature, and the update as it would be without."""
_FILES = (TASK, BORN, PROBE, SPREAD)


@dataclass(frozen=True)
class Update:
    """What an update's header says."""

    root: str
    base: str
    """The hash of the task, or of model.json, that it follows."""
    base_name: str
    whole: bool
    """Whether it begins with model.json."""
    tasks: tuple[tuple[str, str], ...]
    """Name and hash of each task it brings."""
    places: tuple[tuple[int, int, str], ...]
    """Where each file lies: offset, length, sha256."""
    signature: Signature | None = None

    @property
    def head(self) -> str:
        """What a model is known by that has received it."""
        return self.tasks[-1][1]


def ship(folder: Folder, out: Path, since: str | int | None, key: Path | None = None) -> tuple[TaskFacts, ...]:
    """Write what was born after the task `since`, or the whole model; the tasks in it come back. `key`: a file of the
    private key to sign it with."""
    chain = folder.read()
    check_output(out, folder.path, "update", is_update)
    after = 0 if since is None else chain.find(since).number
    tasks = chain.tasks[after:]
    if not tasks:
        raise ModelError(
            f"nothing was learned since '{since}'; there is nothing to ship" if since else "no task to ship"
        )
    contents = [read_bytes(folder.path / MODEL, MOST_BYTES)] if since is None else []
    for task in tasks:
        place = folder.task(task)
        contents.append(read_bytes(place / TASK, MOST_BYTES))
        for name in _FILES[1:]:
            contents.append(read_bytes(place / name, task.files[name].bytes))
            if sha256(contents[-1]) != task.files[name].sha256:
                raise Damaged(place / name, "its content is not what was written (sha256 differs)")
    base = chain.tasks[after - 1] if after else None
    header = sealed(
        {
            "format": "zeroforget update",
            "version": VERSION,
            "model": chain.root,
            "base": base.hash if base else chain.root,
            "base_name": base.name if base else "",
            "whole": since is None,
            "tasks": [{"name": task.name, "hash": task.hash} for task in tasks],
            "files": [{"bytes": len(content), "sha256": sha256(content)} for content in contents],
        }
    )
    signature = [] if key is None else [SIGNED, *_sized(sealed(sign(header, key).to_json()))]
    with output(out) as aside:
        atomic.write_new(aside, b"".join([*signature, MAGIC, *_sized(header), *contents]))
    return tasks


def _sized(text: bytes) -> tuple[bytes, bytes]:
    return len(text).to_bytes(8, "big"), text


def is_update(path: Path) -> bool:
    """Whether a file begins as updates do."""
    with path.open("rb") as file:
        return file.read(len(SIGNED)).startswith((MAGIC, SIGNED))


def read_update(path: Path) -> Update:
    """An update's header, checked against the size of the file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ModelError(f"{path} is no regular file; save the update to one first")
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            signature = _after(file, SIGNED)
            if not signature:
                file.seek(0)
            header = _after(file, MAGIC)
            start = file.tell()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or 'it is no regular file'})") from error
    if not header:
        raise ModelError(f"{path} is no update of a zeroforget model; 'zeroforget ship' makes one")
    try:
        made = _update(Fields(unsealed(header, path), path), start, size)
        return replace(made, signature=read_signature(signature, header, path)) if signature else made
    except Damaged as error:
        raise ModelError(f"{error.found}. Fetch the update again; the model is as it was") from error


def _after(file: BinaryIO, magic: bytes) -> bytes:
    """The text that follows a first line, by its length; nothing if the line is another."""
    if file.read(len(magic)) != magic:
        return b""
    length = int.from_bytes(file.read(8), "big")
    return file.read(length) if length <= MOST_BYTES else b""


@damage_told()
def _update(fields: Fields, offset: int, size: int) -> Update:
    if fields.any("format") != "zeroforget update":
        raise fields.wrong("format", "must be 'zeroforget update'")
    fields.integer("version", 1, VERSION)
    whole = fields.any("whole")
    tasks = fields.groups("tasks", least=1, most=100_000)
    listed = fields.groups("files", least=1, most=400_001)
    places = []
    for one in listed:
        places.append((offset, one.integer("bytes", 1, 2**40), one.hash("sha256")))
        offset += places[-1][1]
    if not isinstance(whole, bool) or len(places) != whole + len(_FILES) * len(tasks):
        raise fields.wrong("files", "must list four files for each task")
    if offset != size:
        raise Damaged(fields.where, f"it has {size} bytes and should have {offset}")
    made = Update(
        fields.hash("model"),
        fields.hash("base"),
        fields.text("base_name", most=64),
        whole,
        tuple((one.text("name", most=64), one.hash("hash")) for one in tasks),
        tuple(places),
    )
    fields.done()
    return made


@dataclass(frozen=True)
class Terms:
    """On which terms an update is received."""

    head: str | None = None
    """The hash that the model must have then, or its first digits."""
    trust: Key | None = None
    """A key that must have signed it, and that the model trusts from then on."""
    older: bool = False
    """Also take one that was signed before the newest that was received."""


def receive(folder: Folder, path: Path, watch: Watch, terms: Terms | None = None) -> tuple[TaskFacts, ...]:
    """Add an update's tasks to the model that it fits; those that were new come back."""
    update, terms = read_update(path), terms or Terms()
    if terms.head is not None and not update.head.startswith(terms.head.lower()):
        raise ModelError(f"{path} leads to the model {update.head[:16]}, not {terms.head}; nothing was changed")
    if terms.trust is not None and (update.signature is None or update.signature.key.key != terms.trust.key):
        whose = "it is not signed" if update.signature is None else f"it is signed by {update.signature.key.short}"
        raise ModelError(f"{path} is not of {terms.trust.short}: {whose}; nothing was changed")
    if not folder.exists() and not folder.entries() and not update.whole:
        folder.check_place()
        raise ModelError(
            f"there is no model in {folder.path}, and {path} is no whole one: it follows task '{update.base_name}'. "
            "Receive one first that 'zeroforget ship --all' wrote"
        )
    with changing(folder, watch):
        return _receive(folder, path, update, terms, watch)


def _receive(folder: Folder, path: Path, update: Update, terms: Terms, watch: Watch) -> tuple[TaskFacts, ...]:
    contents, text = _Contents(path, update), b""
    if folder.exists() or folder.entries():
        chain = folder.read()
        skip = _known(chain, update, path)
    else:
        text = contents.file(0)
        facts = ModelFacts.from_json(unsealed(text, path), path)
        chain, skip = Chain(facts, sha256(text), ()), 0
        if chain.root != update.root:
            raise ModelError(f"{path} does not hold the model that it names; fetch it again")
    trust = read_trust(folder)
    if terms.trust is not None and trust.find(terms.trust.key) is None:
        if trust.keys:
            raise ModelError(f"{folder.path} trusts other keys; 'zeroforget key trust' adds one. Nothing was changed")
        trust = replace(trust, keys=(terms.trust,))
    watch.say(check_origin(trust, update.signature, chain, update.head, path, older=terms.older))
    more: list[tuple[TaskFacts, Path]] = []
    for number, told in list(enumerate(update.tasks))[skip:]:
        aside = folder.aside(f"received-{number}")
        for place, file in enumerate(_FILES):
            atomic.write_new(aside / file, contents.file(update.whole + number * len(_FILES) + place))
        facts_ = folder.read_task(aside, more[-1][0].hash if more else chain.head, chain.model.backbone.shape)
        if (facts_.name, facts_.hash) != told or facts_.number != len(chain.tasks) + len(more) + 1:
            raise ModelError(f"{path}: task '{facts_.name}' is not where its header says; fetch it again")
        if facts_.name in (task.name for task in (*chain.tasks, *(one for one, _ in more))):
            raise ModelError(f"{path} brings a second task '{facts_.name}'; it is no update of this model")
        more.append((facts_, aside))
    _prove(folder, chain, more, path)
    if not folder.exists():
        folder.create(text)
    for task, aside in more:  # every step leaves a whole model; if stopped between, receiving again goes on
        folder.commit(aside, task.folder)
    after = received(trust, update.signature, update.head, new=bool(more))
    if after != read_trust(folder):
        write_trust(folder, after)
    return tuple(task for task, _ in more)


def _prove(folder: Folder, chain: Chain, more: Sequence[tuple[TaskFacts, Path]], path: Path) -> None:
    """All that `verify` would prove of the model with the new tasks, before any of them gets its name."""
    after = replace(chain, tasks=(*chain.tasks, *(task for task, _ in more)))
    report = prove_chain(folder, after, [*map(folder.task, chain.tasks), *(aside for _, aside in more)])
    if not report.holds:
        why = next(one.moved[0] for one in reversed(report.proofs) if one.moved)
        raise ModelError(f"{path} is refused: {_plainly(why)}. Nothing was changed")


def _plainly(why: str) -> str:
    """Damage as it was found, without the advice for a model's own files."""
    return why.partition(". Put back the file")[0]


def _known(chain: Chain, update: Update, path: Path) -> int:
    """How many of the update's tasks the model has already; ModelError unless the update follows from the model."""
    if update.root != chain.root:
        raise ModelError(f"{path} belongs to another model (its beginnings differ); it cannot be applied here")
    hashes = [chain.root, *(task.hash for task in chain.tasks)]
    ends = f"'{chain.tasks[-1].name}'" if chain.tasks else "no task"
    if update.base not in hashes:
        since = f"--since {shlex.quote(chain.tasks[-1].name)}" if chain.tasks else "--all"
        raise ModelError(
            f"{path} follows task '{update.base_name}' ({update.base[:12]}), which this model lacks: it ends with "
            f"{ends}. Receive the update that brings '{update.base_name}' first, or make one with "
            f"'zeroforget ship {since}'"
        )
    have = hashes[hashes.index(update.base) + 1 :]
    brings = [own for _, own in update.tasks]
    for place, (mine, theirs) in enumerate(zip(have, brings, strict=False)):
        if mine != theirs:
            task, brought = chain.tasks[hashes.index(update.base) + place], update.tasks[place][0]
            another = "another " if brought == task.name else ""
            raise ModelError(
                f"{path} brings {another}'{brought}' where this model has learned '{task.name}': "
                f"{_made_for(update, place)}. Take back '{task.name}' and what came after with 'zeroforget undo', or "
                "keep both as separate models"
            )
    return min(len(have), len(brings))


def _made_for(update: Update, same: int) -> str:
    """Which model an update is for, of which the one at hand has only the first `same` tasks."""
    if not update.whole:
        return f"it was made for one that ends with '{update.base_name}' ({update.base[:12]})"
    if same == 0:
        return "it holds a whole model, which differs from this one from the first task on"
    return f"it holds a whole model, which is the same as this one up to '{update.tasks[same - 1][0]}' only"


class _Contents:
    """The files in an update, each checked as it is read."""

    def __init__(self, path: Path, update: Update) -> None:
        self.path, self.places = path, update.places

    def file(self, number: int) -> bytes:
        offset, length, own = self.places[number]
        with self.path.open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        if sha256(content) != own:
            raise ModelError(f"{self.path} is damaged (sha256 of part {number + 1} differs); fetch it again")
        return content


def sizes(tasks: Sequence[TaskFacts]) -> dict[str, Any]:
    """Bytes that tasks take."""
    return {task.name: task.bytes for task in tasks}
