"""The states of a model: it keeps each one that it had, after every task, and a server may answer from any of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroforget.files import atomic
from zeroforget.files.json_fields import Fields, sealed
from zeroforget.store.errors import Damaged, ModelError, damage_told
from zeroforget.store.folder import Chain, Folder
from zeroforget.store.schema import TaskFacts, read_bytes, unsealed
from zeroforget.store.writing import Watch, changing

SERVING = "serving.json"
"""Names the state that is served; without it, that is always the newest."""
_MOST_BYTES = 2**16


@dataclass(frozen=True)
class Change:
    """What is served before and after."""

    before: Chain
    after: Chain

    @property
    def tasks(self) -> Sequence[tuple[TaskFacts, str]]:
        """Every task of either, and what becomes of it: '', 'new' or 'gone'."""
        old, new = {one.hash for one in self.before.tasks}, {one.hash for one in self.after.tasks}
        longer = max(self.before.tasks, self.after.tasks, key=len)
        return [(one, "new" if one.hash not in old else "gone" if one.hash not in new else "") for one in longer]


def served(folder: Folder, chain: Chain) -> Chain:
    """The state of a model that is served."""
    head = chosen(folder)
    if head is None:
        return chain
    places = {chain.root: 0} | {task.hash: place for place, task in enumerate(chain.tasks, 1)}
    if head not in places:
        raise Damaged(folder.path / SERVING, f"it names a state ({head[:16]}) that the model does not have")
    return replace(chain, tasks=chain.tasks[: places[head]])


@damage_told()
def chosen(folder: Folder) -> str | None:
    """The hash of the state that was chosen; None if none was."""
    path = folder.path / SERVING
    if not os.path.lexists(path):  # a link to nothing is no absence
        return None
    fields = Fields(unsealed(read_bytes(path, _MOST_BYTES), path), path)
    if fields.any("format") != "zeroforget serving":
        raise fields.wrong("format", "must be 'zeroforget serving'")
    fields.integer("version", 1, 1)
    head = fields.hash("head")
    fields.done()
    return head


def choose(folder: Folder, task: str | int | None, watch: Watch, *, back: bool = False) -> Change:
    """Serve the state that ends with a task (without one, the newest) from now on. `back`: only an earlier one than is
    served now."""
    folder.read()
    with changing(folder, watch):
        chain = folder.read()
        try:
            before = served(folder, chain)
        except Damaged:  # of a state that was taken back; to choose another is the way out
            before = chain
        count = len(chain.tasks) if task is None else chain.find(task).number
        after = replace(chain, tasks=chain.tasks[:count])
        if back and count >= len(before.tasks):
            raise ModelError(f"the state after '{task}' is not earlier than the one that is served; promote goes on")
        content = sealed({"format": "zeroforget serving", "version": 1, "head": after.head})
        atomic.write_bytes(folder.path / SERVING, content)
    return Change(before, after)
