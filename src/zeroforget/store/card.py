"""A model's card: what it knows, how well, how that is proved; Markdown with the front matter that model hubs read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from zeroforget._version import __version__
from zeroforget.files.text import visible
from zeroforget.store.model import Model
from zeroforget.store.schema import TaskFacts, accuracy_of

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")


def card(model: Model, licence: str | None = None) -> str:
    """The text of a README.md for the folder of a model. Names of tasks and classes are text in it, never markup."""
    return f"---\n{_front(model, licence)}\n---\n\n{_body(model, licence)}"


def _front(model: Model, licence: str | None) -> str:
    """YAML by way of JSON values, which YAML reads: no name can end a value or begin a key."""
    fields: dict[str, Any] = {"license": licence} if licence else {}
    fields |= {
        "library_name": "zeroforget",
        "pipeline_tag": "image-classification",
        "tags": ["continual-learning", "image-classification", "zeroforget"],
        "model-index": [{"name": model.path.resolve().name, "results": [_result(task) for task in model.tasks]}],
    }
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())


def _result(task: TaskFacts) -> dict[str, Any]:
    return {
        "task": {"type": "image-classification", "name": visible(task.name)},
        "dataset": {"type": "imagefolder", "name": visible(task.name), "revision": task.data.pixels},
        "metrics": [{"type": "accuracy", "name": "accuracy on the test part", "value": task.accuracy}]
        if task.measured
        else [],
    }


def _body(model: Model, licence: str | None) -> str:
    backbone, names = model.backbone, f"`{model.tasks[-1].name}`" if model.tasks else ""
    rows = ["| task | classes | accuracy (95 % interval) | test pictures | learned |", "|---|--:|--:|--:|---|"]
    rows += [_row(task) for task in model.tasks]
    prints = [f"- {_plain(task.name)}: `{task.data.pixels}`" for task in model.tasks]
    classes = [f"- **{_plain(task.name)}**: {', '.join(map(_plain, task.classes))}" for task in model.tasks]
    parts = [
        f"# {_plain(model.path.resolve().name)}",
        f"This model classifies {backbone.takes}. It learned {_count(model.tasks)} one after "
        "another, and no task changed an earlier one by a bit. Its network is "
        f"`{backbone.network}`, grown by zeroforget {__version__}.",
        "## Tasks",
        "\n".join(rows),
        "Accuracy is that of a test part which chose nothing.",
        "## Classes",
        "\n".join(classes),
        "## Use",
        "```sh\npip install zeroforget\nzeroforget predict . --task TASK picture.jpg\n```",
        f"TASK is one of the names above{f', such as {names}' if re.fullmatch(r'`[-.A-Za-z0-9]+`', names) else ''}.",
        "## Proofs",
        f"```sh\nzeroforget verify . --is {model.head}\n```",
        "This checks every file by its hash, every task's answers bit for bit, and every number of every network.",
        "Fingerprints of the test pictures, as they were decoded:",
        "\n".join(prints),
        "## Licence",
        _plain(licence) if licence else "None is stated. Ask whoever gave you this model.",
    ]
    return "\n\n".join(parts) + "\n"


def _row(task: TaskFacts) -> str:
    cells = (_plain(task.name), str(len(task.classes)), accuracy_of(task), str(task.data.held_out), task.learned[:10])
    return f"| {' | '.join(cells)} |"


def _count(tasks: Iterable[TaskFacts]) -> str:
    number = len(list(tasks))
    return "1 task" if number == 1 else f"{number} tasks"


def _plain(name: str) -> str:
    return _MARKUP.sub(r"\\\1", visible(name)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")
