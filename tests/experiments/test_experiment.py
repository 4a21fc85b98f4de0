"""An experiment's file: what it says is what runs, and what is misspelt is named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.experiments.helpers import write_toml
from zeroforget import nets
from zeroforget.experiments.experiment import Choice, Experiment
from zeroforget.experiments.resolve import conform, make_scenario
from zeroforget.training import Regime


def load(text: str, tmp_path: Path, **kwargs: object) -> Experiment:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return Experiment.load(path, **kwargs)  # type: ignore[arg-type]


BASE = 'scenario = "digits/5"\nnetwork = "small"\n'
OTHER = 'network = "{}"\nscenario = "{}"\nmethods = ["finetuning"]\n'
HELPERS = "tests.experiments.helpers"


def test_a_short_file_gets_the_papers_regime(tmp_path: Path) -> None:
    experiment = load(BASE + 'methods = ["finetuning", "ewc"]\n', tmp_path)
    assert experiment.name == "mine"
    assert experiment.regime == Regime()
    assert experiment.seeds == (0,)
    assert [c.label for c in experiment.methods] == ["finetuning", "ewc"]
    assert not experiment.search.enabled


def test_every_scenario_method_and_seed_is_a_run_with_a_folder_of_its_own(tmp_path: Path) -> None:
    experiment = load(
        'scenario = ["digits/5", "cifar100/10"]\nnetwork = "small"\nmethods = ["finetuning", "ewc"]\nseeds = [0, 3]\n',
        tmp_path,
    )
    folders = [str(config.folder) for config in experiment.runs()]
    assert len(set(folders)) == len(folders) == 8
    assert folders[0] == "mine/digits-5/finetuning/seed-0"


def test_options_in_force_include_defaults(tmp_path: Path) -> None:
    experiment = load(BASE + '[methods.ewc]\n[methods.firm]\nmethod = "ewc"\nstrength = 9\n', tmp_path)
    weak, firm = experiment.methods
    assert weak.all_options()["strength"] == 5000.0
    assert (firm.label, firm.method, firm.all_options()["strength"]) == ("firm", "ewc", 9.0)
    own, plain = load(BASE + '[methods.tfm-nofn]\nfn = "all"\n[methods.tfm]\n', tmp_path).methods
    assert (own.all_options()["fn"], plain.all_options()["fn"]) == ("all", "reused")
    assert Choice("tfm-nofn", "tfm-nofn").all_options()["fn"] == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scenari = 1\n" + BASE, "no key 'scenari'; did you mean 'scenario'"),
        (BASE + "[methods.finetuning]\n[regime]\nbatchsize = 3\n", "no key 'batchsize'; did you mean 'batch_size'"),
        (BASE + '[methods.finetuning]\n[regime]\nlr = "fast"\n', "lr must be float, not 'fast'"),
        (BASE + "[methods.finetuning]\n[regime]\nclip = 'no'\n", "clip must be float, not 'no'"),
        (BASE + "[methods.finetuning]\n[regime]\noptions = 3\n", "options must be a table, not 3"),
        (BASE + "[methods.tfm]\nsearch = ['a']\n", "search must be a list of float, not ['a']"),
        (
            'network = {name = "vgg16", norm = "layer"}\nscenario = "digits/5"\nmethods = ["ewc"]\n',
            "norm must be 'none' or 'batch', not 'layer'",
        ),
        (BASE + "[methods.finetuning]\n[regime]\nlr = -1\n", "lr must be positive"),
        (BASE + "[methods.ewc]\nstrenght = 3\n", "no key 'strenght'; did you mean 'strength'"),
        (BASE + '[methods.ewc]\nstrength = "big"\n', "strength must be float"),
        (BASE + "[methods.ewc]\nsamples = true\n", "samples must be int, not True"),
        (BASE + 'methods = ["finetunning"]\n', "no method 'finetunning'; did you mean 'finetuning'"),
        (BASE + "methods = [3]\n", "methods must be a list of names"),
        (BASE, "lacks 'methods'"),
        ('scenario = "digits/5"\nmethods = ["ewc"]\n', "lacks 'network'"),
        ('network = "smal"\nscenario = "digits/5"\nmethods = ["ewc"]\n', "did you mean 'small'"),
        ('network = {name = "small", widht = 1.0}\nscenario = "digits/5"\nmethods = ["ewc"]\n', "mean 'width'"),
        ('scenario = {name = "digits/5", seed = "x"}\nnetwork = "small"\nmethods = ["ewc"]\n', "seed must be int"),
        ('scenario = "digit/5"\nnetwork = "small"\nmethods = ["ewc"]\n', "did you mean 'digits/5'"),
        (BASE + "[methods.ewc]\n[search]\nenable = true\n", "did you mean 'enabled'"),
        (BASE + "[methods.ewc]\n[search]\ndrop = 1.5\n", "0 <= drop < 1"),
        ("seeds = [1, 1]\n" + BASE + "[methods.ewc]\n", "different numbers"),
        ('seeds = ["a"]\n' + BASE + "[methods.ewc]\n", "seeds must be a list of int"),
        ("a = = b", "not valid TOML"),
        (
            BASE + 'methods = ["nowhere.at.all:Method"]\n',
            "cannot find 'nowhere.at.all:Method': No module named 'nowhere'",
        ),
        (BASE + 'methods = ["nowhere/mine.py:Near"]\n', "give the module, not its file, such as nowhere.mine:Near"),
        (BASE + f'methods = ["{HELPERS}:Pulledd"]\n', "has no 'Pulledd'; did you mean 'Pulled'?"),
        (BASE + f'methods = ["{HELPERS}:Blind"]\n', "cannot be called with (net, example, *, options): too many"),
        (
            OTHER.format(f"{HELPERS}:classifier", "digits/5"),
            "(shape, *, options): missing a required argument: 'classes'",
        ),
        (OTHER.format("small", f"{HELPERS}:placed"), "(*, options): missing a required argument: 'where'"),
        (BASE + 'methods = ["collections:OrderedDict"]\n', "not a subclass"),
        ('network = "math:nothing"\nscenario = "digits/5"\nmethods = ["ewc"]\n', "cannot find 'math:nothing'"),
    ],
)
def test_mistakes_are_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load(text, tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "error", "words"),
    [
        ("own_1", "import no_such_thing\n", ValueError, "'own_1' was found, but imports 'no_such_thing', which is not"),
        ("own_2", "from torch import no_such_thing\n", ImportError, "cannot import name 'no_such_thing'"),
        ("own_3", "import torch\ntorch.no_such_thing\n", AttributeError, "module 'torch' has no attribute"),
        ("own_4", "", ValueError, r"cannot find 'own_4:Near': 'own_4' has no 'Near' \(it is /.*/own_4\.py\)$"),
    ],
)
def test_a_mistake_in_ones_own_module_is_not_taken_for_another_name(
    name: str, text: str, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module lies in the current folder, wherever the command does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(error, match=words):
        load(BASE + f'methods = ["{name}:Near"]\n', tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("./own", "not its file, such as own:Near"),
        (".own", "not its file, such as own:Near"),
        ("./own.py", "not its file, such as own:Near"),
        (".kit.own", "not its file, such as kit.own:Near"),
        ("kit/own", "not its file, such as kit.own:Near"),
        (".\\\\kit\\\\own.py", "not its file, such as kit.own:Near"),
        ("{here}/kit/own.py", "not its file, such as kit.own:Near"),
        ("../own", "current folder; change to {above} and give own:Near"),
        ("{above}/own.py", "current folder; change to {above} and give own:Near"),
        ("./v1.2/own", "current folder; change to {here}/v1.2 and give own:Near"),
    ],
)
def test_a_module_that_is_given_by_its_path_is_told_by_its_name(
    given: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"here": tmp_path, "above": tmp_path.parent}
    for part in (f'[methods."{given}:Near"]\n', f'[methods.mine]\nmethod = "{given}:Near"\n'):
        with pytest.raises(ValueError, match=f"{re.escape(words.format(**places))}$"):
            load(BASE + part.format(**places), tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "renamed"),
    [("json", "json.py", "json.py"), ("json", "json/__init__.py", "json"), ("json.near", "json/near.py", "json")],
)
def test_a_module_whose_name_is_taken_is_told_to_be_renamed(
    name: str, file: str, renamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    told = f"; rename {tmp_path / renamed}: another module has that name"
    with pytest.raises(ValueError, match=f"{re.escape(told)}$"):
        load(BASE + f'methods = ["{name}:Near"]\n', tmp_path)


@pytest.mark.parametrize(("name", "place"), [("json", json.__file__), ("sys", "a part of Python")])
def test_where_a_module_was_found_is_told(name: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' has no 'Near' \(it is {re.escape(place)}\)$"):
        load(BASE + f'methods = ["{name}:Near"]\n', tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("seeds.x=1", "--set seeds.x=1: 'seeds' is [0] and has no keys; set 'seeds' itself"),
        ("network.width.y=1", "'network.width' is 8 and has no keys"),
        ("about.x=1", "'about' is 'for people' and has no keys"),
        ("pulled=3", "--set pulled=3: 'pulled' is a method; set one of its options, as in pulled.NAME=3"),
        ("methods.finetuning=3", "'finetuning' is a method; set one of its options"),
        ("packnet.tasks=3", "this experiment does not run 'packnet'; name it with --methods too"),
        ("regime.lr=-1", "[regime]: lr must be positive, not -1.0"),
        ("name=..", "'..' cannot be the name of a folder"),
        ("name=...", "'...' cannot be the name of a folder"),
    ],
)
def test_changes_that_cannot_be_made_are_named(change: str, words: str, tmp_path: Path) -> None:
    path = write_toml(tmp_path)
    path.write_text('about = "for people"\n' + path.read_text())
    with pytest.raises(ValueError) as caught:
        Experiment.load(path, changes=[change])
    assert words in str(caught.value)


def test_a_device_for_a_regime_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'regime' is 3 and has no keys"):
        load("regime = 3\n" + BASE + 'methods = ["ewc"]\n', tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("scenarios", "methods", "words"),
    [
        ('[{data="digits",tasks=2},{data="digits",tasks=5}]', '["ewc"]', "give one of its scenarios another name"),
        ('"digits/5"', '{"a b" = {method="ewc"}, "a:b" = {method="ewc"}}', "rename one of the methods 'a b' and 'a:b'"),
        ('"digits/5"', '{".." = {method="ewc"}}', "'..' cannot be the name of a folder"),
        ('{name="..",data="digits"}', '["ewc"]', "'..' cannot be the name of a folder"),
    ],
)
def test_every_run_needs_a_folder_of_its_own(scenarios: str, methods: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load(f'network = "small"\nscenario = {scenarios}\nmethods = {methods}\n', tmp_path)
    assert words in str(caught.value)
    named = '[{name="two",data="digits",tasks=2},{data="digits",tasks=5}]'
    assert len(load(f'network = "small"\nscenario = {named}\nmethods = ["ewc"]\n', tmp_path).runs()) == 2


@pytest.mark.parametrize("seed", [-1, 2**32, 99999999999999999999])
def test_a_scenarios_seed_has_a_range(seed: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"seed is 0 or more, and below 4,294,967,296; got {seed}"):
        load(BASE + 'methods = ["ewc"]\n', tmp_path, changes=[f"scenario.seed={seed}"])


@pytest.mark.parametrize(
    ("method", "option", "words"),
    [
        ("tfm", "early=2.0", "[methods.tfm]: early is a share"),
        ("packnet", "prune=1.5", "[methods.packnet]: prune is the share"),
    ],
)
def test_options_out_of_range_are_named_before_anything_is_trained(
    method: str, option: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        load(BASE + f'methods = ["finetuning", "{method}"]\n', tmp_path, changes=[f"{method}.{option}"])
    assert words in str(caught.value)


def test_reading_an_experiment_builds_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(*_: object, **__: object) -> None:
        raise AssertionError("a network was built")

    monkeypatch.setattr(nets, "build", poison)
    monkeypatch.setattr(nn.Conv2d, "__init__", poison)
    monkeypatch.setattr(nn.Linear, "__init__", poison)
    files = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))
    assert len(files) > 5
    for file in files:
        assert Experiment.load(file).methods


def test_what_a_small_network_does_not_allow_is_left_to_the_real_one(tmp_path: Path) -> None:
    (choice,) = load(BASE + "[methods.pnn]\ntasks = 500\n", tmp_path).methods
    assert choice.options == {"tasks": 500}


def test_a_file_may_begin_with_the_mark_of_notepad_but_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(BASE + 'methods = ["ewc"]\nabout = "naïve"\n', encoding="utf-8-sig")
    assert Experiment.load(path).about == "naïve"
    path.write_text(BASE + 'methods = ["ewc"]\nabout = "naïve"\n', encoding="latin-1")
    with pytest.raises(ValueError, match=r"mine\.toml is not UTF-8 text .*; save it as UTF-8"):
        Experiment.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no experiment file .*none\.toml"):
        Experiment.load(tmp_path / "none.toml")


def test_set_changes_regime_methods_network_and_search(tmp_path: Path) -> None:
    changes = [
        "regime.lr=0.5",
        "regime.options.momentum=0.3",
        "pulled.strength=7",
        "network.width=4",
        "search.learning_rates=[0.1, 0.2]",
        "search.enabled=true",
        "regime.optimizer=rmsprop",
        "about=hello",
    ]
    experiment = Experiment.load(write_toml(tmp_path), changes=changes, seeds=[4, 5], methods=["pulled"])
    assert experiment.regime.lr == 0.5
    assert experiment.regime.options == {"momentum": 0.3}
    assert experiment.regime.optimizer == "rmsprop"
    assert [c.options for c in experiment.methods] == [{"strength": 7.0}]
    assert experiment.network.options == {"width": 4}
    assert experiment.search.enabled
    assert experiment.search.learning_rates == (0.1, 0.2)
    assert experiment.seeds == (4, 5)
    assert experiment.about == "hello"


def test_a_scenario_may_be_written_out(tmp_path: Path) -> None:
    text = 'network = "small"\nmethods = ["ewc"]\n[scenario]\ndata = "digits"\nsizes = [4, 6]\nseed = 2\n'
    (scenario,) = load(text, tmp_path).scenarios
    assert scenario.name == "digits"
    assert [len(task.classes) for task in make_scenario(scenario).tasks] == [4, 6]
    with pytest.raises(ValueError, match="did you mean 'sizes'"):
        load(text.replace("sizes", "sizess"), tmp_path)


def test_a_scenario_function_is_told_where_the_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import zeroforget.data
told = []
def rooted(tasks: int = 5, root: str | None = None):
    told.append(root)
    return zeroforget.data.scenario({"data": "digits", "tasks": tasks})
def plain():
    return rooted()
"""
    (tmp_path / "scenario_with_root.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for function, options, expected in (
        ("rooted", "", tmp_path / "sets"),
        ("rooted", ', root = "mine"', "mine"),  # what the file says goes first
        ("plain", "", None),
    ):
        scenario = f'scenario = {{ name = "scenario_with_root:{function}"{options} }}\n'
        (part,) = load(scenario + 'network = "small"\nmethods = ["ewc"]\n', tmp_path).scenarios
        make_scenario(part, tmp_path / "sets")
        assert sys.modules["scenario_with_root"].told[-1] == expected


def test_a_default_makes_an_argument_of_a_method_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
from zeroforget.methods.baselines import Finetuning
class Mine(Finetuning):
    name = "mine"
    def __init__(self, net, example, strength=1.0):
        super().__init__(net, example)
        self.strength = strength
"""
    (tmp_path / "method_with_default.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = BASE + '[methods.mine]\nmethod = "method_with_default:Mine"\nstrength = 3.0\n'
    (choice,) = load(text, tmp_path).methods
    assert choice.all_options() == {"strength": 3.0}
    with pytest.raises(ValueError, match="no key 'example'"):
        load(text.replace("strength", "example"), tmp_path)


def test_set_turns_a_name_into_a_table(tmp_path: Path) -> None:
    experiment = load(BASE + "[methods.ewc]\n", tmp_path, changes=["network.width=0.5", "scenario.seed=3"])
    assert experiment.network.to_dict() == {"name": "small", "width": 0.5}
    assert experiment.scenarios[0].to_dict() == {"name": "digits/5", "seed": 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("regim.lr=1", "did you mean 'regime'"),
        ("pulld.strength=1", "did you mean 'pulled'"),
        ("pulled.strenth=1", "did you mean 'strength'"),
        ("regime.lr", "wants key=value"),
        ("regime.lrr=1", "did you mean 'lr'"),
    ],
)
def test_a_misspelt_change_is_named(change: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        Experiment.load(write_toml(tmp_path), changes=[change])
    assert words in str(caught.value)


def test_no_methods_at_all_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--methods names none"):
        Experiment.load(write_toml(tmp_path), methods=[])


def test_methods_not_in_the_file_run_with_their_defaults(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path), methods=["ewc", "finetuning"])
    assert [c.label for c in experiment.methods] == ["ewc", "finetuning"]


def test_device_is_checked(tmp_path: Path) -> None:
    assert Experiment.load(write_toml(tmp_path), device="cpu").regime.device == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            Experiment.load(write_toml(tmp_path), device="cuda")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, 1.0),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        (None, int | None, None),
        (3, int | None, 3),
        ([1, "a"], tuple[int, str], (1, "a")),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ("x", str, "x"),
        (0.1, float | tuple[float, ...], 0.1),
    ],
)
def test_values_take_the_form_that_is_asked(value: object, hint: object, expected: object) -> None:
    got = conform(value, hint, "here")
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"), [(True, int), (True, float), (1.5, int), ("1", int), ([1], tuple[int, int]), (1, list[int])]
)
def test_values_of_another_form_are_refused(value: object, hint: object) -> None:
    with pytest.raises(ValueError, match="here must be"):
        conform(value, hint, "here")


def test_the_file_may_say_where_the_data_lie(tmp_path: Path) -> None:
    text = 'scenario = "folder:pets/2"\nnetwork = "small"\nmethods = ["finetuning"]\ndata_root = "../sets"\n'
    assert load(text, tmp_path).data_root == tmp_path / "../sets"
    assert load(BASE + 'methods = ["finetuning"]\n', tmp_path).data_root is None
    with pytest.raises(ValueError, match="data_root"):
        load(text.replace('"../sets"', "3"), tmp_path)
    assert load(text.replace("../sets", "."), tmp_path).data_root == tmp_path
    with pytest.raises(ValueError, match=r"\.toml: data_root is empty; name a folder, or leave it out$"):
        load(text.replace("../sets", ""), tmp_path)
    with pytest.raises(ValueError, match=r"\.toml: data_root is empty; name a folder, or leave it out$"):
        load(text, tmp_path, changes=["data_root="])


def test_data_are_read_from_where_the_file_says(tmp_path: Path) -> None:
    from zeroforget.experiments.runner import run

    text = 'scenario = "mnist/5"\nnetwork = "small"\nmethods = ["finetuning"]\ndata_root = "nothing-here"\n'
    with pytest.raises(ValueError, match="nothing-here"):
        run(load(text, tmp_path), tmp_path / "runs")
    with pytest.raises(ValueError, match="nor-there"):  # what is said at the start goes first
        run(load(text, tmp_path), tmp_path / "runs", data_root=tmp_path / "nor-there")


def test_a_change_goes_to_the_method_whose_label_says_most(tmp_path: Path) -> None:
    methods = "[methods.ewc]\n[methods.'ewc.firm']\nmethod = 'ewc'\n"
    experiment = load(BASE + methods, tmp_path, changes=["ewc.firm.strength=7.0", "ewc.strength=1.0"])
    assert [choice.options for choice in experiment.methods] == [{"strength": 1.0}, {"strength": 7.0}]
