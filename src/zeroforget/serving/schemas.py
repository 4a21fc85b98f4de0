"""What the server says, as types: from these the OpenAPI description is made."""

from __future__ import annotations

from pydantic import BaseModel, Field

from zeroforget.serving.batching import Answer, Shadow
from zeroforget.serving.catalog import Catalog
from zeroforget.store import Report, TaskFacts
from zeroforget.store.task_guess import SURE


class ClassProbability(BaseModel):
    """A class and its probability."""

    class_: str = Field(alias="class")
    probability: float


class TaskProbability(BaseModel):
    """A task and how likely the picture belongs to it."""

    task: str
    probability: float


class Prediction(BaseModel):
    """What the model says of a picture."""

    task: str = Field(description="The task that was asked, or the likeliest.")
    classes: list[ClassProbability] = Field(description="The likeliest classes, best first.")
    tasks: list[TaskProbability] | None = Field(None, description="If no task was asked: a guess, best first.")
    sure: bool | None = Field(None, description="If no task was asked: whether the guess is likely enough to go by.")
    model: str = Field(description="The hash of the model that answered.")


class TaskSummary(BaseModel):
    """A task, what it added, and whether it verifies."""

    name: str
    classes: list[str]
    accuracy: float | None = Field(description="On the test part; null if it was adopted without pictures.")
    interval: tuple[float, float] | None = Field(description="Where it lies with 95 % confidence.")
    features: int = Field(description="Of its network.")
    features_added: int
    bytes_added: int
    operations: int = Field(description="Multiplications and additions for one picture.")
    learned: str
    verified: bool | None = Field(description="Null: not proved, or not yet.")


class Proved(BaseModel):
    """One of the proofs of `zeroforget verify`."""

    title: str
    holds: bool
    found: str
    moved: list[str]


class Move(BaseModel):
    """Pictures that the newest state would take for another task's."""

    served: str
    newest: str
    pictures: int


class Compared(BaseModel):
    """The newest state beside the one that is served."""

    model: str = Field(description="The hash of the newest state.")
    new_tasks: list[str]
    compared: int = Field(description="Pictures whose task both have guessed.")
    other: int = Field(description="Of these, those that would be of another task.")
    moves: list[Move]


class Tasks(BaseModel):
    """The model and its tasks."""

    model: str
    network: str
    shape: list[int] = Field(description="Channels, height and width of its pictures.")
    bytes: int
    verified: bool | None
    proofs: list[Proved]
    trouble: str | None = Field(description="Why the folder cannot be read as it is now, if so.")
    tasks: list[TaskSummary]
    shadow: Compared | None = Field(None, description="With --shadow, while a newer state is not served yet.")


class Health(BaseModel):
    """Whether the server can answer."""

    status: str = Field(description="ok, degraded (answers, but see 'reason') or failing.")
    reason: str | None
    tasks: int
    waiting: int


class Problem(BaseModel):
    """Why there is no answer."""

    error: str


def prediction(answer: Answer, head: str, top: int) -> dict[str, object]:
    """An answer as plain JSON values."""
    ranked = sorted(zip(answer.task.classes, answer.probabilities, strict=True), key=lambda pair: -pair[1])
    out: dict[str, object] = {"task": answer.task.name, "model": head}
    if answer.tasks is not None:
        out["sure"] = answer.tasks[0][1] >= SURE
        out["tasks"] = [{"task": name, "probability": p} for name, p in answer.tasks]
    return out | {"classes": [{"class": name, "probability": p} for name, p in ranked[:top]]}


def tasks(catalog: Catalog) -> Tasks:
    """The model and its tasks, as they are served now."""
    snapshot, report = catalog.snapshot, catalog.report
    backbone = snapshot.chain.model.backbone
    features, rows = 0, list[TaskSummary]()

    def here(why: str) -> str:  # where the folder lies is nobody's business
        return why.replace(str(catalog.folder.path), catalog.folder.path.name)

    for task in snapshot.tasks:
        features += sum(task.born.values())
        rows.append(_summary(task, features, _verified(task, report)))
    proofs = [
        Proved(title=one.title, holds=one.holds, found=one.found, moved=[here(why) for why in one.moved])
        for one in (() if report is None else report.proofs)
    ]
    return Tasks(
        model=snapshot.chain.head, network=backbone.network, shape=list(backbone.shape), bytes=snapshot.disk,
        verified=None if report is None else report.holds, proofs=proofs,
        trouble=here(catalog.trouble) if catalog.trouble else None, tasks=rows, shadow=None,
    )  # fmt: skip


def compared(catalog: Catalog, shadow: Shadow) -> Compared | None:
    """What the newest state would change, if it is not the one that is served."""
    newest = catalog.candidate
    if newest is None:
        return None
    new = [task.name for task in newest.tasks[len(catalog.snapshot.tasks) :]]
    moves = [Move(served=a, newest=b, pictures=count) for (a, b), count in shadow.moves.most_common(1000)]
    return Compared(model=newest.chain.head, new_tasks=new, compared=shadow.compared, other=shadow.other, moves=moves)


def _summary(task: TaskFacts, features: int, verified: bool | None) -> TaskSummary:
    return TaskSummary(
        name=task.name, classes=list(task.classes), features=features,
        accuracy=task.accuracy if task.measured else None, interval=task.interval if task.measured else None,
        features_added=sum(task.born.values()), bytes_added=task.bytes, operations=task.operations,
        learned=task.learned, verified=verified,
    )  # fmt: skip


def _verified(task: TaskFacts, report: Report | None) -> bool | None:
    """False only if a reason names the task; where another one is damaged, this one is not proved."""
    if report is None:
        return None
    if report.holds:
        return True
    names = (f"task '{task.name}'", f"/{task.folder}/", f"/{task.folder} ")
    return False if any(name in why for one in report.proofs for why in one.moved for name in names) else None
