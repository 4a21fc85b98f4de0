"""What is odd about a network that was handed to us, in words: looked for before growing, and when a trial fails."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from zeroforget.axes.find import CannotGrow, two_rows
from zeroforget.axes.inputs import Batch, Pick, Unpack, as_batch, unpacks, with_one_input_and_output
from zeroforget.axes.plain_modules import MODULE_ATTRIBUTES, hollow
from zeroforget.axes.trace import in_eval, unchanged
from zeroforget.growing.user_buffers import joined
from zeroforget.proving.shared_objects import refuse_shared

_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)


def check_given(net: nn.Module, example: Tensor | Batch) -> None:
    """ValueError for what is no network, no batch of inputs, or holds no numbers to compute with."""
    if not isinstance(net, nn.Module):
        raise ValueError(f"the network must be a torch.nn.Module, not {type(net).__name__}")
    if not isinstance(example, (Tensor, Batch)) or (isinstance(example, Batch) and not example.tensors()):
        raise ValueError(
            "example must be a tensor, a batch of inputs, or a tuple or dictionary of such, not "
            f"{type(example).__name__}: of an array make one with torch.as_tensor"
        )
    if (takes := _takes(net, example)) is not None:
        raise ValueError(
            f"the network must take the example, but its forward takes {takes}: wrap it in a module that does, or pass "
            "a tuple or a dictionary of all its inputs"
        )
    if isinstance(example, Tensor) and (example.dim() < 2 or not len(example)):
        raise ValueError(f"example must be a batch of inputs, not a tensor of shape {tuple(example.shape)}")
    own = {f"parameter '{name}'": p for name, p in net.named_parameters()}
    if not own:
        raise CannotGrow("the network has no parameters, so there is nothing to learn and nothing to grow")
    given = example.tensors() if isinstance(example, Batch) else [example]
    for name, tensor in [*own.items(), *(("the example", each) for each in given)]:
        if name in own and tensor.dtype == torch.float16:
            raise CannotGrow(
                f"{name} is of torch.float16, whose steps and statistics round to zero: pass net.float(), and train "
                "and serve it under torch.autocast"
            )
        if name in own and not tensor.is_floating_point():
            raise CannotGrow(f"{name} is of {tensor.dtype}, which cannot learn: make it a buffer with register_buffer")
        if tensor.is_meta:
            raise CannotGrow(
                f"{name} is on the device 'meta' and holds no numbers: give it some, on a device that has them"
            )
        if tensor.is_inference() and name in own:
            raise CannotGrow(
                f"{name} was made in torch.inference_mode, so it can never learn: build and load the network outside"
            )
        if not bool(tensor.isfinite().all()):
            raise CannotGrow(f"{name} holds NaN or infinity: nothing could be proved of what comes out")
    refuse_uncopyable(net)


@contextmanager
def taking(net: nn.Module, example: Tensor) -> Iterator[None]:
    """What fails inside because the network cannot take the example is a ValueError that says so; the network's state
    is afterwards what it was."""
    try:
        with unchanged(net):
            yield
    except CannotGrow:
        raise
    except Exception as error:
        try:
            with torch.no_grad(), unchanged(net):
                net(example[:2])
        except _ERRORS as reason:
            raise ValueError(
                f"the network does not run on an example of shape {tuple(example.shape)} and {example.dtype}: "
                f"{str(reason).partition(chr(10))[0]}. Pass a batch as the network takes it: its shape, its kind of "
                "numbers, on its device"
            ) from error
        if isinstance(error, ValueError):
            raise
        what = str(error).partition("\n")[0] or type(error).__name__
        if "require grad" in what or "does not require" in what:
            what = "it asks for gradients in its own forward, torch.autograd.grad"
        raise CannotGrow(
            f"the network runs, but cannot be followed ({what}): grow the part of it that does without, and run the "
            "rest outside"
        ) from error


def _takes(net: nn.Module, example: Tensor | Batch) -> str | None:
    """What a network's forward takes, if it cannot do with the example alone."""
    try:
        taken = inspect.signature(net.forward)
    except (TypeError, ValueError):  # it does not tell
        return None
    try:
        batch = example if isinstance(example, Batch) else Batch((example,))
        taken.bind(*batch.args, **batch.named)
    except TypeError:
        return f"({', '.join(taken.parameters)})"
    return None


def refuse_uncopyable(net: nn.Module) -> None:
    """Raise CannotGrow for a network of which no copy can be made that works: proof and growth begin with one."""
    learned = {id(p) for p in net.parameters()}
    for path, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotGrow(
                "the network is compiled by torch.jit, so its layers cannot be replaced: pass the plain one"
            )
        if type(module).__module__.startswith("torch._dynamo"):  # by name: to load the compiler takes seconds
            raise CannotGrow("the network is wrapped by torch.compile: pass the plain one, and compile what is grown")
        _refuse_hooks(path, module)
        for name, value in vars(module).items():
            if name in MODULE_ATTRIBUTES or name == "_compiled_call_impl":  # which no copy takes over
                continue
            if isinstance(value, Tensor) and not value.is_leaf:
                raise CannotGrow(
                    f"{_called(path)} keeps '{name}', a tensor that gradients flow through, so it cannot be copied: "
                    f"keep {name}.detach() instead, or set it to None before"
                )
            if not isinstance(module, nn.RNNBase) and any(id(v) in learned for v in _items(value)):
                raise CannotGrow(
                    f"{_called(path)} keeps parameters of the network in '{name}', where they would never change: "
                    "read them from their modules"
                )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _refuse_embedding(path, module)
    refuse_shared(net)


def _refuse_embedding(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse:
        raise CannotGrow(f"embedding '{path}' has sparse gradients, which cannot be cut: set its sparse to False")
    if module.max_norm is not None:
        raise CannotGrow(
            f"embedding '{path}' has max_norm={module.max_norm:g}, so it rewrites its weights whenever it is asked, "
            "old ones too: shorten them once by weight.data.renorm_(norm_type, 0, max_norm), then set its max_norm to "
            "None"
        )


def _called(path: str) -> str:
    return f"module '{path}'" if path else "the network"


def _refuse_hooks(path: str, module: nn.Module) -> None:
    """Weights that a hook computes anew are no parameters."""
    for hook in module._forward_pre_hooks.values():
        name = type(hook).__name__
        if isinstance(hook, BasePruningMethod):
            raise CannotGrow(
                f"{_called(path)} is pruned by a hook: make that final with torch.nn.utils.prune.remove(module, "
                f"'{hook._tensor_name}') first"
            )
        if type(hook).__module__.startswith("torch.nn.utils.") and name in {"WeightNorm", "SpectralNorm"}:
            kind = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}[name]
            other = f" first, or use torch.nn.utils.parametrizations.{kind}" if kind == "weight_norm" else ""
            raise CannotGrow(
                f"{_called(path)} computes its weight anew in a hook (torch.nn.utils.{kind}): fix it at its value "
                f"of now with torch.nn.utils.remove_{kind}(module){other}"
            )


def _items(value: Any) -> list[Any]:
    """A value, or all that it lists."""
    return list(value.values()) if type(value) is dict else list(value) if type(value) in (list, tuple) else [value]


def unused(net: nn.Module, example: Tensor) -> list[str]:
    """The parameters that take no part in the answer to the example, in eval mode."""
    try:  # gradients without storage tell as much
        return _without_gradient(hollow(net).eval(), example[:2].to("meta"))
    except _ERRORS:
        pass
    try:
        with unchanged(net):
            return _without_gradient(net, example[:2])
    except _ERRORS:  # the trials will say what is wrong
        return []


def _without_gradient(net: nn.Module, x: Tensor) -> list[str]:
    asked = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    try:
        for parameter, _ in asked:
            parameter.requires_grad_(parameter.is_floating_point())
        names, parameters = zip(*((n, p) for n, p in net.named_parameters() if p.requires_grad), strict=True)
        with torch.enable_grad():
            out = net(x)
            if not out.requires_grad:  # all of it runs without gradients, so all learning is its heads'
                return list(names)
            grads = torch.autograd.grad(out.float().sum(), parameters, allow_unused=True)
    finally:
        for parameter, learned in asked:
            parameter.requires_grad_(learned)
    return [name for name, grad in zip(names, grads, strict=True) if grad is None]


def hints(net: nn.Module) -> str:
    """What about this network may explain a failed trial, as sentences to put behind the message."""
    hooked = [
        path
        for path, m in net.named_modules()
        if any(not isinstance(h, (Pick, Unpack)) for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    ]
    plain = [
        f"{path}.{name}" if path else name
        for path, module in net.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    nested = [p for p, m in net.named_modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in net.parameters()})
    found = ""
    if len(kinds) > 1:
        found += (
            f". Its parameters are of several kinds ({', '.join(kinds)}), and code that casts between them rounds: "
            "bring all to one kind, and train and use it under torch.autocast"
        )
    if nested:
        found += (
            f". Where words are padded, its encoders ({_few(nested)}) compute other things in eval mode than in "
            "training: make them with enable_nested_tensor=False"
        )
    if hooked:
        found += f". Its modules have forward hooks ({_few(hooked)}): remove them, or do their work in forward"
    if plain:
        found += (
            f". It keeps plain tensors ({_few(plain)}): make them buffers with register_buffer, so that they are copied"
        )
    return found


@torch.no_grad()
def wavers(net: nn.Module, example: Tensor) -> bool:
    """Whether a network in eval mode gives one input two answers."""
    with unchanged(net):
        return not torch.equal(torch.nan_to_num(net(example)), torch.nan_to_num(net(example)))


def _few(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def one_input_and_output(net: nn.Module, example: Any, output: str | int | None) -> tuple[nn.Module, Tensor | Batch]:
    """The network and the example as everything behind this sees them: one input, one output."""
    several = isinstance(net, nn.Module) and isinstance(example, (tuple, list, Mapping, Batch))
    given = as_batch(net, example) if several else example
    check_given(net, given)
    if needs_all(net, given):
        given, several = as_batch(net, given), True
        given.whole = True
    return with_one_input_and_output(net, several=several, output=output), given


def needs_all(net: nn.Module, example: Tensor | Batch) -> bool:
    """Whether a network runs on the whole example, but not on two rows of it: its rows are the nodes of a graph."""
    rows = two_rows(example)
    if len(rows) == len(example) or _runs(copy.deepcopy(net), rows):
        return False
    return _runs(copy.deepcopy(net), example)


def _runs(net: nn.Module, example: Tensor | Batch) -> bool:
    """Whether a copy of a network runs; it may change as it does."""
    batch = example if isinstance(example, Batch) and not unpacks(net) else Batch((example,))
    try:
        with torch.no_grad():
            net.eval()(*batch.args, **batch.named)
    except Exception:  # of which one is told when it matters
        return False
    return True


@torch.no_grad()
def refuse_training_state(net: nn.Module, x: Tensor) -> None:
    """Raise CannotGrow if training writes into parameters, or if what it leaves elsewhere than in buffers changes the
    answers: that belongs to no task.

    A plain float alone is warned of when it has changed (`user_buffers.warn_if_moved`).
    """
    trained = copy.deepcopy(net)
    with unchanged(net):
        expected = net(x)
    if not isinstance(expected, Tensor):  # of which one is told elsewhere
        return
    try:
        with torch.random.fork_rng(devices=[]):
            trained.train()
            for given in (two_rows(x[:1]), x * 0.5 if x.is_floating_point() else x):  # not the input asked of below
                trained(given)
    except Exception:  # it needs more than the example for that
        return
    _refuse_written(net, trained)
    for path, module in net.named_modules():
        other = trained.get_submodule(path)
        other._buffers, other._parameters = copy.deepcopy(module._buffers), dict(module._parameters)
        vars(other).update({n: v for n, v in vars(module).items() if type(vars(other).get(n)) is float})
    changed = _changed(trained, net)
    with in_eval(trained), unchanged(net):
        again = net(x)
        try:
            answer = trained(x) if changed else again
        except Exception:
            answer = None
        if _equal(again, expected) and _equal(answer, again):
            return
        repeats = _equal(net(x), again)  # else of that one is told elsewhere
    if repeats and not _equal(again, expected):
        raise CannotGrow(
            "the network keeps what it saw in training outside of itself, in a global or a class, and its answers "
            "depend on it: make it a tensor and a buffer (register_buffer) of the module"
        )
    if repeats:
        names = ", ".join(f"'{name}'" for name, _ in changed[:4])
        raise CannotGrow(
            f"the network keeps what it saw in training in {names}, and its answers depend on it, but a plain "
            "attribute belongs to no task and is not saved: make it a tensor and a buffer "
            "(register_buffer) that is written in training mode alone"
        )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _refuse_written(net: nn.Module, trained: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if not torch.equal(parameter, trained.get_parameter(name)):
            raise CannotGrow(
                f"the network writes into its own parameter '{name}' in training mode, which is no step of an "
                "optimizer and would not reach what is newborn: do so outside of it, or compute with what it would "
                "become"
            )


def _changed(after: nn.Module, before: nn.Module) -> list[tuple[str, Any]]:
    """Plain attributes with another value, by their full names."""
    others = dict(before.named_modules())
    return [
        (joined(path, name), value)
        for path, module in after.named_modules()
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES and not _same(value, vars(others[path]).get(name), 0)
    ]


def _same(a: Any, b: Any, depth: int) -> bool:
    """Whether two values are the same, as far as that can be told; what cannot be compared counts as the same."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.layout == torch.strided
        return bool(both and torch.equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and (depth > 3 or all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and (depth > 3 or all(_same(a[k], b[k], depth + 1) for k in a))
    if isinstance(a, (int, float, str, bool, type(None), set, frozenset)):
        return bool(a == b)
    return depth > 3 or not hasattr(a, "__dict__") or isinstance(a, nn.Module) or _same(vars(a), vars(b), depth + 1)
