"""What several processes of one server have in common: a folder with their weights, once, and what each reports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.files.locks import alone_in, locked
from zeroforget.store.verify import Proof, Report

log = logging.getLogger("zeroforget.serving")
PULSE_S = 1.0
"""How often a process reports."""
SILENT_S = 15.0
"""One that has not reported for so long is stuck."""
ALIGNED = 64
"""Where a tensor begins in a file of weights: bits may depend on it, and torch's own memory is aligned so."""
_ALLOWANCE = struct.Struct("dd")
_SAMPLE = re.compile(r"(\S+?)(\{.*\})? (\S+)")
_ADDED = ("_total", "_bucket", "_sum", "_count")
_LEAST = {"zeroforget_tasks", "zeroforget_verified", "zeroforget_readable"}


@dataclass(frozen=True)
class Together:
    """One of several processes, as it sees the others."""

    folder: Path
    number: int
    count: int

    @property
    def first(self) -> bool:
        """Whether this one verifies the model, for all."""
        return self.number == 0

    # Weights ---------------------------------------------------------------------------------------------------

    def share(self, net: nn.Module, name: str) -> None:
        """From now on the numbers of this network are those of a file, which the others map, too. Without room for the
        file they stay as they are."""
        file, tensors = self.folder / f"{name}.weights", _tensors(net)
        try:
            with locked(self.folder / ".lock", "a worker"):
                if not file.exists():
                    _write(file, tensors)
                map_file(file, tensors)
        except OSError as error:
            log.warning("weights are copied, not shared: %s", error)

    def forget(self, name: str) -> None:
        """Nobody will ask for this file again; those who have mapped it keep it."""
        with contextlib.suppress(OSError):
            (self.folder / f"{name}.weights").unlink(missing_ok=True)

    # Reports ---------------------------------------------------------------------------------------------------

    def pulse(self, model: str, status: str, reason: str | None, metrics: str) -> None:
        """Report how this process is."""
        values = {"model": model, "status": status, "reason": reason, "metrics": metrics, "at": time.monotonic()}
        self._tell(f"pulse-{self.number}.json", values)

    def pulses(self) -> dict[int, dict[str, Any]]:
        """What each reported last, by its number."""
        found = {number: self._told(f"pulse-{number}.json") for number in range(self.count)}
        return {number: values for number, values in found.items() if values is not None}

    def trouble(self) -> tuple[str, str] | None:
        """Status and reason, if another one is not well."""
        pulses = self.pulses()
        for number, values in pulses.items():
            if number != self.number and values["status"] == "failing":
                return "failing", f"worker {number + 1}: {values['reason']}"
            if number != self.number and time.monotonic() - values["at"] > SILENT_S:
                return "failing", f"worker {number + 1} has said nothing for {SILENT_S:g} seconds"
        if missing := sorted(set(range(self.count)) - pulses.keys() - {self.number}):
            return "degraded", f"worker {missing[0] + 1} of {self.count} is started again"
        return None

    def metrics(self, own: str) -> str:
        """Counts of all processes together, those that ended too."""
        others = [values["metrics"] for number, values in self.pulses().items() if number != self.number]
        ended = self._told("ended.json")
        return merged([own, *others], [] if ended is None else [ended["metrics"]])

    def ended(self, number: int) -> None:
        """Said by whoever started them: this one has ended. What it had counted still counts."""
        last, before = self._told(f"pulse-{number}.json"), self._told("ended.json")
        if last is not None:
            gone = [one["metrics"] for one in (before, last) if one is not None]
            self._tell("ended.json", {"metrics": merged(gone, [])})
            (self.folder / f"pulse-{number}.json").unlink(missing_ok=True)

    # What one finds for all ------------------------------------------------------------------------------------

    def tell_report(self, about: str, report: Report) -> None:
        """Let the others know what `verify` found of the model of this hash."""
        self._tell("report.json", {"about": about, "head": report.head, "proofs": [asdict(p) for p in report.proofs]})

    def report(self, about: str) -> Report | None:
        """What was found of this model."""
        values = self._told("report.json")
        if values is None or values["about"] != about:
            return None
        proofs = (Proof(one["title"], one["holds"], one["found"], tuple(one["moved"])) for one in values["proofs"])
        return Report(tuple(proofs), values["head"])

    @contextlib.contextmanager
    def allowance(self, key: str) -> Iterator[list[float]]:
        """What is left of a key's rate, and since when, for all processes together: a list to be changed inside."""
        with alone_in(self.folder / f"rate-{key}") as handle:
            held = os.pread(handle, _ALLOWANCE.size, 0)
            values = list(_ALLOWANCE.unpack(held)) if len(held) == _ALLOWANCE.size else [1.0, time.monotonic()]
            yield values
            os.pwrite(handle, _ALLOWANCE.pack(*values), 0)

    def _tell(self, name: str, values: Mapping[str, Any]) -> None:
        aside = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        with contextlib.suppress(OSError):  # of a full disk; the next one may find room
            aside.write_text(json.dumps(values))
            aside.replace(self.folder / name)

    def _told(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None


def merged(texts: list[str], ended: list[str]) -> str:
    """Metrics of several processes as one text: sums, but for what holds only if it holds for each. Of those that
    ended only counts count."""
    values: dict[str, float] = {}
    lines: dict[str, None] = {}
    for place, text in enumerate((*texts, *ended)):
        for line in text.splitlines():
            match = _SAMPLE.fullmatch(line) if not line.startswith("#") else None
            if match is None:
                lines[line] = None
                continue
            key, value = f"{match[1]}{match[2] or ''}", float(match[3])
            if place >= len(texts) and not match[1].endswith(_ADDED):
                continue
            if key not in values:
                values[key] = value
                lines[key] = None
            elif match[1] in _LEAST:
                values[key] = min(values[key], value)
            else:
                values[key] += value
    out = [f"{line} {values[line]:.17g}" if line in values else line for line in _grouped(lines)]
    return "\n".join(out).replace(" nan\n", " NaN\n") + "\n"


def _grouped(lines: Mapping[str, None]) -> list[str]:
    """Lines below the heading of their own metric: one process may know of a path that another has not met."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        words = line.split()
        name = words[2] if line.startswith("#") else re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", line)
        groups.setdefault(name, []).append(line)
    return [line for group in groups.values() for line in group]


# Files of weights ----------------------------------------------------------------------------------------------------


def _tensors(net: nn.Module) -> list[Tensor]:
    """Those that hold numbers, each once."""
    named = net.state_dict(keep_vars=True).values()  # also those of earlier tasks
    found = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers(), *named)}
    return [tensor for tensor in found.values() if tensor.numel()]


def _order(tensor: Tensor) -> list[int]:
    """Its dimensions, outermost in memory first: what is laid out by channels stays so."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def _write(file: Path, tensors: list[Tensor]) -> None:
    aside = file.with_suffix(".aside")
    try:
        with aside.open("wb") as out:
            for tensor in tensors:
                out.write(bytes(-out.tell() % ALIGNED))
                plain = tensor.detach().permute(_order(tensor)).contiguous()
                out.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def map_file(file: Path, tensors: list[Tensor]) -> None:
    """Give these tensors the numbers of a file, which is read as they are, and copied if anybody writes to them."""
    size, place = file.stat().st_size, 0
    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,))  # type: ignore[call-overload]
    for tensor in tensors:
        place += -place % ALIGNED
        order = _order(tensor)
        flat = whole[place : place + tensor.nbytes].view(tensor.dtype)
        back = sorted(range(len(order)), key=order.__getitem__)
        tensor.data = flat.view([tensor.shape[dim] for dim in order]).permute(back)
        place += tensor.nbytes
    if place != size:
        raise OSError(f"{file} is not of this network")
