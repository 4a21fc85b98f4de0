"""An experiment as a TOML file says it: scenario, network, methods with their options, regime, seeds."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from zeroforget.data.scenarios import OWN
from zeroforget.experiments.resolve import (
    NamedPart,
    arguments,
    can_be_called,
    check_network,
    check_scenario,
    conform,
    known_key,
)
from zeroforget.experiments.search import SearchSettings
from zeroforget.methods import registry
from zeroforget.training import Regime

_KEYS = ("name", "about", "scenario", "network", "methods", "regime", "seeds", "vary", "search", "data_root")
_VARY = ("order", "split")


@dataclass(frozen=True)
class Choice:
    """A method with its options; the label is its own name unless the file gives it another."""

    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)

    def all_options(self, regime: Regime | None = None) -> dict[str, Any]:
        """The options in force: the signature's defaults, what the name implies, what was chosen; what is left open, as
        the regime decides it."""
        cls, implied = registry.find(self.method)
        defaults = {n: p.default for n, p in registry.options(cls).items() if p.default is not p.empty}
        return cls.settled(defaults | implied | self.options, regime or Regime())


@dataclass(frozen=True)
class RunConfig:
    """One scenario, one method, one seed: all that decides the results of a run."""

    experiment: str
    scenario: NamedPart
    network: NamedPart
    choice: Choice
    regime: Regime
    seed: int
    search: SearchSettings

    @property
    def folder(self) -> Path:
        """Where it goes, below the output folder. ValueError for a name that would lead elsewhere."""
        parts = (self.experiment, self.scenario.name, self.choice.label, f"seed-{self.seed}")
        for part in parts:
            if not part.strip("."):
                raise ValueError(f"'{part}' cannot be the name of a folder; choose another name")
        return Path(*(re.sub(r"[^\w.+=-]+", "-", part) for part in parts))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, defaults included: a default that changes makes another configuration."""
        values = {
            "scenario": self.scenario.to_dict(),
            "network": self.network.to_dict(),
            "label": self.choice.label,
            "method": self.choice.method,
            "options": self.choice.all_options(self.regime),
            "regime": dataclasses.asdict(self.regime),
            "seed": self.seed,
            "search": dataclasses.asdict(self.search),
        }
        return _plain(values)

    def defaults(self) -> dict[str, Any]:
        """What a configuration means that an older version wrote, without the fields that came later."""
        return defaults(self.choice.method)


def defaults(method: str | None) -> dict[str, Any]:
    """The options of a method (none of one that is not known), regime and search of a run that says nothing of them."""
    options = {} if method is None else Choice(method, method).all_options()
    regime, search = dataclasses.asdict(Regime()), dataclasses.asdict(SearchSettings())
    return _plain({"options": options, "regime": regime, "search": search})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


@dataclass(frozen=True)
class Part:
    """Some of an experiment's runs, as a job of several takes them: of three parts the second has runs 2, 5, 8, ..."""

    number: int
    parts: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.parts:
            raise ValueError(f"a part is NUMBER/PARTS, such as 3/8, counted from 1; got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    @staticmethod
    def parse(text: str) -> Part:
        """From '3/8'."""
        number, _, parts = text.partition("/")
        try:
            return Part(int(number), int(parts))
        except ValueError:
            raise ValueError(f"a part is NUMBER/PARTS, such as 3/8, counted from 1; got '{text}'") from None

    def of(self, runs: Sequence[RunConfig]) -> list[RunConfig]:
        """Its runs."""
        return list(runs[self.number - 1 :: self.parts])


@dataclass(frozen=True)
class Experiment:
    """Every method on every scenario with every seed."""

    name: str
    scenarios: tuple[NamedPart, ...]
    network: NamedPart
    methods: tuple[Choice, ...]
    regime: Regime = field(default_factory=Regime)
    seeds: tuple[int, ...] = (0,)
    vary: tuple[str, ...] = ()
    """What each seed decides beside the start of the network and the batches: the classes' "order", the "split"."""
    search: SearchSettings = field(default_factory=SearchSettings)
    about: str = ""
    data_root: Path | None = None
    """Where its data sets lie, if the file says so; no part of what a run depends on."""

    def runs(self) -> list[RunConfig]:
        """All runs, scenario by scenario, seed by seed."""
        return [
            RunConfig(self.name, self._drawn(scenario, seed), self.network, choice, self.regime, seed, self.search)
            for scenario in self.scenarios
            for seed in self.seeds
            for choice in self.methods
        ]

    def _drawn(self, scenario: NamedPart, seed: int) -> NamedPart:
        """The scenario as this seed draws it."""
        if not self.vary:
            return scenario
        return NamedPart(scenario.name, {**scenario.options, **dict.fromkeys(self.vary, seed)})

    @staticmethod
    def load(
        path: Path,
        *,
        changes: Sequence[str] = (),
        methods: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        device: str | None = None,
    ) -> Experiment:
        """Read a TOML file; `changes` are 'key=value' such as regime.lr=0.1 or ewc.strength=100."""
        raw = {"name": path.stem} | _read(path)
        if isinstance(root := raw.get("data_root"), str) and root:  # as seen from where the file lies
            raw["data_root"] = str(path.parent / Path(root).expanduser())
        for key in raw:
            known_key(key, _KEYS, str(path))
        raw["methods"] = _method_tables(raw.get("methods", {}), str(path))
        if methods is not None:
            if not methods:
                raise ValueError(
                    "--methods names none; give some, such as tfm,ewc, or leave it out for those of the file"
                )
            raw["methods"] = dict(_chosen(word, raw["methods"]) for word in methods)
        for change in changes:
            _apply(raw, change)
        if seeds is not None:
            raw["seeds"] = list(seeds)
        if device is not None:
            _apply(raw, f"regime.device={device}")
        return Experiment.from_dict(raw, where=str(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "the experiment") -> Experiment:
        """Check every key and value of a parsed TOML file."""
        for key in raw:
            known_key(key, _KEYS, where)
        for key in ("name", "scenario", "network", "methods"):
            if not raw.get(key):
                raise ValueError(f"{where} lacks '{key}'")
        scenarios = _scenarios(raw["scenario"], where)
        network = _part(raw["network"], f"{where}: network")
        check_network(network, f"{where}: [network]")
        seeds = raw.get("seeds", [0])
        seeds = conform([seeds] if isinstance(seeds, int) else seeds, tuple[int, ...], f"{where}: seeds")
        if not seeds or len(set(seeds)) != len(seeds):
            raise ValueError(f"{where}: seeds must be one or more different numbers, not {list(seeds)}")
        made = Experiment(
            name=conform(raw["name"], str, f"{where}: name"),
            about=conform(raw.get("about", ""), str, f"{where}: about"),
            data_root=_data_root(raw, where),
            scenarios=scenarios,
            network=network,
            methods=_choices(_method_tables(raw["methods"], where), where),
            regime=_dataclass(Regime, raw.get("regime", {}), f"{where}: [regime]"),
            seeds=seeds,
            vary=_vary(raw.get("vary", []), scenarios, where),
            search=_dataclass(SearchSettings, raw.get("search", {}), f"{where}: [search]"),
        )
        _check_folders(made, where)
        return made


def _vary(raw: Any, scenarios: Sequence[NamedPart], where: str) -> tuple[str, ...]:
    vary: tuple[str, ...] = conform(raw, tuple[str, ...], f"{where}: vary")
    if unknown := [word for word in vary if word not in _VARY]:
        raise ValueError(f"{where}: vary names '{unknown[0]}'; a seed may also decide 'order' and 'split'")
    for scenario in scenarios if vary else ():
        if ":" in scenario.name and not scenario.name.startswith(OWN):
            raise ValueError(f"{where}: vary draws scenarios of ours; '{scenario.name}' is a function")
        if twice := [word for word in vary if word in scenario.options]:
            raise ValueError(f"{where}: '{twice[0]}' is fixed by the scenario and varied; drop one of them")
    return vary


def _chosen(word: str, tables: Mapping[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A method of the command line: a name, or LABEL=METHOD, with the options that the file has under that label."""
    label, equals, method = word.partition("=")
    if equals and not (label and method):
        raise ValueError(f"--methods wants NAME or LABEL=METHOD, such as l2=mymodule:MyMethod; got '{word}'")
    return label, tables.get(label, {}) | ({"method": method} if equals else {})


def _read(path: Path) -> dict[str, Any]:
    """A TOML file's keys. Some editors put a mark before the first one."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError(f"no experiment file {path}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _data_root(raw: Mapping[str, Any], where: str) -> Path | None:
    if "data_root" not in raw:
        return None
    if not (root := conform(raw["data_root"], str, f"{where}: data_root")):
        raise ValueError(f"{where}: data_root is empty; name a folder, or leave it out")
    return Path(root)


def _check_folders(experiment: Experiment, where: str) -> None:
    """Every run has a folder of its own, below the output folder."""
    taken: dict[Path, RunConfig] = {}
    for config in experiment.runs():
        try:
            folder = config.folder
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if (other := taken.setdefault(folder, config)) is not config:
            raise ValueError(f"{where}: two runs would share the folder {folder}; {_apart(other, config)}")


def _apart(one: RunConfig, other: RunConfig) -> str:
    if one.scenario is other.scenario:
        return f"rename one of the methods '{one.choice.label}' and '{other.choice.label}'"
    return (
        f'give one of its scenarios another name, such as {{ name = "{other.scenario.name}-again", data = ... }}, or '
        "an experiment of its own"
    )


def _scenarios(raw: Any, where: str) -> tuple[NamedPart, ...]:
    items = raw if isinstance(raw, list) else [raw]
    scenarios = tuple(_part(_named_by_data(item), f"{where}: scenario") for item in items)
    for scenario in scenarios:
        check_scenario(scenario, f"{where}: scenario")
    return scenarios


def _named_by_data(raw: Any) -> Any:
    """A scenario of one's own that has no name is called after its data."""
    if not isinstance(raw, dict) or "name" in raw or "data" not in raw:
        return raw
    return {"name": raw["data"] if isinstance(raw["data"], str) else "+".join(map(str, raw["data"])), **raw}


def _part(raw: Any, where: str) -> NamedPart:
    """A name alone, or a table with a name and options."""
    if isinstance(raw, str):
        return NamedPart(raw)
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise ValueError(f"{where} must be a name, or a table with a name and options, not {raw!r}")
    return NamedPart(raw["name"], {k: v for k, v in raw.items() if k != "name"})


def _method_tables(raw: Any, where: str) -> dict[str, dict[str, Any]]:
    """`methods` as a table of tables; a plain list of names has no options."""
    if isinstance(raw, list) and all(isinstance(name, str) for name in raw):
        return {name: {} for name in raw}
    if isinstance(raw, dict) and all(isinstance(options, dict) for options in raw.values()):
        return {name: dict(options) for name, options in raw.items()}
    raise ValueError(f"{where}: methods must be a list of names, or a table [methods.NAME] of options for each")


def _choices(tables: Mapping[str, Mapping[str, Any]], where: str) -> tuple[Choice, ...]:
    choices = []
    for label, table in tables.items():
        options = dict(table)
        method = conform(options.pop("method", label), str, f"{where}: [methods.{label}] method")
        cls, implied = registry.find(method)
        place = f"{where}: [methods.{label}]"
        options = arguments(cls, options, place)
        if missing := [
            n for n, p in registry.options(cls).items() if p.default is p.empty and n not in options | implied
        ]:
            raise ValueError(f"{place} lacks '{missing[0]}', which has no default")
        can_be_called(cls, "net, example", options, f"{place}: '{method}'")
        choices.append(Choice(label, method, options))
        _try_out(choices[-1], place)
    return tuple(choices)


def _try_out(choice: Choice, where: str) -> None:
    """A value out of range is met before anything is trained; a class of one's own says so when it is made."""
    if choice.options and ":" not in choice.method:
        try:
            registry.check(choice.method, **choice.options)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _dataclass(cls: type[Any], raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be a table of keys, not {raw!r}")
    names = [f.name for f in dataclasses.fields(cls)]
    hints = get_type_hints(cls)
    for key in raw:
        known_key(key, names, where)
    values = {key: conform(value, hints[key], f"{where}: {key}") for key, value in raw.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _apply(raw: dict[str, Any], change: str) -> None:
    """One `--set key=value` on the parsed file, before anything is checked."""
    path, equals, text = change.partition("=")
    if not equals or not path.strip():
        raise ValueError(f"--set wants key=value, such as regime.lr=0.1; got '{change}'")
    path = path.strip().removeprefix("methods.")
    owner = max((m for m in raw["methods"] if path.startswith(f"{m}.")), key=len, default=None)
    if owner is not None:
        raw["methods"][owner][path.removeprefix(f"{owner}.")] = _value(text)
        return
    first, *rest = path.split(".")
    if path in raw["methods"]:
        raise ValueError(f"--set {change}: '{path}' is a method; set one of its options, as in {path}.NAME={text}")
    if first not in _KEYS and first in registry.names():
        raise ValueError(f"--set {change}: this experiment does not run '{first}'; name it with --methods too")
    known_key(first, [*(k for k in _KEYS if k != "methods"), *raw["methods"]], f"--set {change}: the experiment")
    if not rest:
        raw[first] = _value(text)
        return
    if first in ("scenario", "network") and isinstance(raw.get(first), str):
        raw[first] = {"name": raw[first]}
    inner = raw
    for place, key in enumerate(path.split(".")[:-1]):
        table = inner.get(key, {})
        if not isinstance(table, dict):
            owner = ".".join(path.split(".")[: place + 1])
            raise ValueError(f"--set {change}: '{owner}' is {table!r} and has no keys; set '{owner}' itself")
        inner[key] = inner = dict(table)
    inner[rest[-1]] = _value(text)


def _value(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def foreign_code(path: Path) -> list[str]:
    """Code that an experiment's file names as `package.module:name`, where the file lies outside of the current folder:
    whoever runs it should know, since a file from elsewhere then runs code. Nothing is imported."""
    if path.resolve().is_relative_to(Path.cwd()) or not path.is_file():
        return []

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from (text for pair in value.items() for one in pair for text in texts(one))
        elif isinstance(value, list):
            yield from (text for one in value for text in texts(one))

    return sorted({text for text in texts(_read(path)) if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text)})
