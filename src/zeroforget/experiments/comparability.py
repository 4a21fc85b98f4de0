"""What decided the results of runs, and in what they differ: seeds of one row may differ in nothing else."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from zeroforget.experiments.experiment import defaults
from zeroforget.experiments.results import Results
from zeroforget.methods import registry

SETUP = ("method", "scenario", "search")
"""What a run's `setup` holds: parts of its configuration that runs of earlier versions did not write down."""
DRAWS = ("order", "split")
"""Of a scenario, what each seed may draw anew."""
PLACES = {"device", "capture"}
"""Of a regime, what says where and how a run computes, not what."""


def in_force(results: Results, name: str) -> Any:
    """A part of a run's configuration ("options", "regime", "tasks" or one of `SETUP`); what came with a later version
    had its default before. None: the run is of a version that did not write that part down."""
    own = _written(results, name)
    if name == "scenario" and own is not None:
        # A draw that goes by the run's seed is the same for all methods of that seed.
        return {key: value for key, value in own.items() if key not in DRAWS or value != results.seed}
    if name not in ("options", "regime", "search") or own is None:
        return own
    known = results.method if results.method in registry.names() else None
    return defaults(known)[name] | own


def _written(results: Results, name: str) -> Any:
    return results.setup.get(name) if name in SETUP else getattr(results, name)


def check_alike(method: str, runs: Sequence[Results]) -> None:
    """Refuse runs of one method that differ in more than the seed, or not in that."""
    check_seeds(method, runs)
    for other in runs[1:]:
        for name in (*SETUP, "options", "regime", "tasks"):
            then, now = (in_force(each, name) for each in (runs[0], other))
            if None not in (then, now) and then != now:
                raise ValueError(
                    f"the runs of '{method}' with seeds {runs[0].seed} and {other.seed} differ in their {name}: "
                    f"{_written(runs[0], name)} and {_written(other, name)}; they cannot share a row"
                )


def check_seeds(method: str, runs: Sequence[Results]) -> None:
    """Refuse runs of one method that have a seed in common: each would stand for the other."""
    seeds = [r.seed for r in runs]
    if twice := [seed for seed in sorted(set(seeds)) if seeds.count(seed) > 1]:
        home = f" of the experiment '{runs[0].experiment}'" if runs[0].experiment else ""
        raise ValueError(
            f"method '{method}'{home} is there twice on {runs[0].scenario} with seed {twice[0]}; give one run of each"
        )


def settings(runs: Sequence[Results]) -> list[dict[str, Any]]:
    """For each of several runs of one method, all that decided its results: `strength`, `regime.lr`, `search.drop`.

    What one of them does not tell counts for none.
    """
    told = [name for name in SETUP if all(in_force(run, name) is not None for run in runs)]
    return [
        dict(in_force(run, "options"))
        | {key: value for name in ("regime", *told) for key, value in _flat(name, in_force(run, name)).items()}
        for run in runs
    ]


def same_training(one: Results, other: Results) -> bool:
    """Whether two methods were trained under one regime, on images that were varied alike."""
    return not _otherwise(one, other)


def unlike(methods: Sequence[Sequence[Results]], titles: Sequence[str]) -> tuple[str, ...]:
    """A note on the methods of a table that were trained otherwise than most of them, and how."""
    firsts = [runs[0] for runs in methods]
    votes = Counter(
        i for i, j in itertools.product(range(len(firsts)), repeat=2) if same_training(firsts[i], firsts[j])
    )
    if not votes:
        return ()
    usual = firsts[votes.most_common(1)[0][0]]
    parts = [
        f"{title} ({', '.join(found)})"
        for title, each in zip(titles, firsts, strict=True)
        if (found := _otherwise(usual, each))
    ]
    return (f"Not trained as the others, so not to be compared with them: {'; '.join(parts)}.",) if parts else ()


def _otherwise(usual: Results, each: Results) -> list[str]:
    """'regime.lr 0.1 instead of 0.05' for each value in which one run's training differs from another's."""
    found = []
    for name in ("regime", "scenario"):
        theirs, own = (in_force(run, name) for run in (usual, each))
        if None in (theirs, own):
            continue
        theirs, own = _flat(name, theirs), _flat(name, own)
        keys = [key for key in theirs | own if key.rpartition(".")[2] not in PLACES]
        found += [f"{k} {own.get(k)} instead of {theirs.get(k)}" for k in keys if own.get(k) != theirs.get(k)]
    return found


def other_code(runs: Sequence[Results]) -> bool:
    """Whether the code of somebody's method is not the same for all of its runs."""
    return len({code for run in runs if (code := run.environment.get("code"))}) > 1


def _flat(name: str, values: Any) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {name: values}
