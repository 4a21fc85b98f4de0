"""A parameter that grows: frozen values in a buffer, newborn ones in parameters of their own.

Only the newborn parts are `nn.Parameter`s, so no optimizer can reach anything older, whatever its weight decay or
momentum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.labels import Label, axis_names, births_of
from zeroforget.axes.plain_modules import is_plain
from zeroforget.growing.rank_births import RankBirth, orthonormal
from zeroforget.operators.places import Places, select
from zeroforget.operators.plain import Block, LowRank


class GrowingTensor(nn.Module):
    """One parameter of a network, wide enough for the newest task.

    Two of its dimensions at most grow: `row` and `col` (of a layer's weight: outputs and inputs). The newborn part is
    then an L: `rows`, new along `row`; and `cols`, old along `row` but new along `col`.

    `writes` is the dimension along which it writes features; -1 if it writes none but has a number for each one of
    others, as a gain has; None if that is not known. New values start as that wants; where they are kept does not
    depend on it. `blank` is the row that an embedding keeps at zero. `leans` tells whether tasks may have rank births
    here: `value` never holds these, they are added to what a task uses. `initial` becomes its own: whoever goes on
    using it passes a copy.
    """

    value: Tensor
    fresh: Tensor
    rows: nn.Parameter | None
    cols: nn.Parameter | None
    youngest: int = 2**62
    """The last task that brought values here, if that is known."""
    _brought: frozenset[int] | None = None

    def __init__(
        self,
        initial: Tensor,
        labels: tuple[Label, ...],
        writes: int | None = 0,
        blank: int | None = None,
        leans: bool = False,
    ) -> None:
        super().__init__()
        self.labels = labels or (1,)
        self.scalar = not labels
        growing = [d for d, label in enumerate(self.labels) if any(axis_names(label))]
        if len(growing) > 2:
            raise ValueError(f"a parameter of shape {tuple(initial.shape)} grows along more than two dimensions")
        others = [d for d in growing if d != 0]
        self.row, self.col = (growing[0], growing[1]) if len(others) == 2 else (0, others[0] if others else -1)
        self.mixes = writes != -1 and initial.dim() >= 2
        """Whether it sums over inputs: the fewer there are, the larger its values."""
        self.out = self.row if writes in {None, -1} else writes
        self.blank = blank
        self.frozen = not initial.requires_grad
        """Whether it was given as a constant: what it holds stays, and what is born later learns."""
        self.register_buffer("value", initial.detach().reshape(initial.shape or (1,)))
        self.register_parameter("rows", None)
        self.register_parameter("cols", None)
        # What fresh values look like: spread and mean of the network as it was given, and how many inputs it had. In
        # the state, so that a network loaded from it grows as the one that was saved would.
        exact = self.value.double()
        spread = exact.std(correction=0) if exact.numel() > 1 else torch.tensor(0.0)
        facts = [float(spread), float(exact.mean() if exact.numel() else 0.0), float(self._inputs())]
        self.register_buffer("fresh", torch.tensor(facts, dtype=torch.float64))
        self.leans = leans and self.mixes
        self.rank_births = nn.ModuleDict()
        """The task's number → its rank birth; most weights have none."""
        self._low: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._old: Tensor | None = None
        self.task = self.youngest = -1
        self.row_births = torch.zeros(self.value.shape[self.row], dtype=torch.int64)
        self.col_births = self._no_births()

    # Structure -------------------------------------------------------------------------------------------------

    def begin(self, births: Mapping[str, Tensor]) -> None:
        """The first task: of the values that were given, keep those of features that exist (birth 0).

        Fewer inputs want larger weights, as a fresh network of this width would have.
        """
        before = self._inputs()
        dims = [(d, births_of(label, births) <= 0) for d, label in enumerate(self.labels)]
        if [int(kept.sum()) for _, kept in dims] != list(self.value.shape) or not is_plain(self.value):
            self.value = select(self.value, dims)  # what keeps all stays where it is
        if before != self._inputs():
            self.value *= math.sqrt(before / self._inputs())
        self._open(0, *self._births_along(births, 0))

    def grow(self, births: Mapping[str, Tensor], task: int, *, bridge: float | None) -> None:
        """Make room for what is born with `task`. New features start fresh; what old features read of them starts at
        `bridge` times a fresh value (0: old features compute what they did). None draws nothing: all starts at 0."""
        self.close()
        rows, cols = self._births_along(births, task)
        old = self.value
        shape = list(old.shape)
        shape[self.row] = len(rows)
        if self.col >= 0:
            shape[self.col] = len(cols)
        value = old.new_zeros(shape) if bridge is None else old.new_empty(shape)
        self.value = value
        if bridge is not None:
            self._fill(value)
        if self.mixes and bridge is not None and bridge != 1 and (self.col >= 0 or self.out != self.row):
            outs = {self.row: rows, self.col: cols}.get(self.out, torch.zeros(shape[self.out]))
            kept = Places.where(outs < task)
            kept.put(value, self.out, kept.take(value, self.out) * bridge)
        self._place(old, rows < task, cols < task)
        self._open(task, rows, cols)

    def advance(self, task: int) -> None:
        """Tasks up to this one brought nothing here."""
        if task > self.task:
            self.close()
            self._open(task, self.row_births, self.col_births)

    def shrink(self) -> None:
        """Take back what was born with the newest task; the one before is open again."""
        task = self.task - 1
        self.value = self._born_by(task)
        rows, cols = self.row_births, self.col_births
        if str(self.task) in self.rank_births:
            del self.rank_births[str(self.task)]
        self._open(task, rows[rows <= task], cols[cols <= task])
        if (birth := self.newest_rank()) is not None:
            birth.reopen(self.value.dtype)

    def close(self) -> None:
        """Write the newborn values down; nothing of this tensor is a parameter any more."""
        self.sync()
        self.rows, self.cols = None, None
        if (birth := self.newest_rank()) is not None:
            birth.close()

    def old_block(self) -> tuple[int, int]:
        """The size of what is older than the newest task, as a matrix: what leaned on it would have this shape."""
        old, all_rows = len(self.block.old_out), self.value.shape[self.row]
        rest = self.value.numel() // max(1, all_rows)
        if self.col >= 0:
            rest = rest // self.value.shape[self.col] * self._old_in_count()
        return old, rest

    def lean(self, rank: int, *, draw: bool = True) -> None:
        """Give the newest task a rank birth: a step of zero, in random directions at right angles."""
        rows, inputs = self.old_block()
        up = self.value.new_zeros(rows, rank)
        down = orthonormal(rank, inputs, self.value) if draw else self.value.new_zeros(rank, inputs)
        self.rank_births[str(self.task)] = RankBirth(up, down)
        self._forget_low()

    def newest_rank(self) -> RankBirth | None:
        """The rank birth of the newest task, if it has one."""
        return self.rank_birth(self.task)

    def rank_birth(self, task: int) -> RankBirth | None:
        """What a task adds to the weights older than it, if anything."""
        found = self.rank_births._modules.get(str(task))
        assert found is None or isinstance(found, RankBirth)
        return found

    def reopen(self) -> None:
        """The newborn parameters anew, from values that were written into the whole."""
        if self.task >= 0:
            self._open(self.task, self.row_births, self.col_births)

    def brings(self, task: int) -> bool:
        """Whether a task brought values here."""
        if self._brought is None:
            self._brought = frozenset([*self.row_births.tolist(), *self.col_births.tolist()])
        return task in self._brought

    def _births_along(self, births: Mapping[str, Tensor], task: int) -> tuple[Tensor, Tensor]:
        rows = births_of(self.labels[self.row], births)
        cols = births_of(self.labels[self.col], births) if self.col >= 0 else self._no_births()
        return rows[rows <= task], cols[cols <= task]

    def _old_in_count(self) -> int:
        return 0 if self.block.old_in is None else len(self.block.old_in)

    def _no_births(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)

    def _open(self, task: int, rows: Tensor, cols: Tensor) -> None:
        self._forget_low()
        self.task, self.row_births, self.col_births = task, rows, cols
        self._brought = None
        self.youngest = max(int(births.max()) if len(births) else 0 for births in (rows, cols))
        self.block = Block(
            new_out=Places.where(rows == task),
            old_out=Places.where(rows < task),
            new_in=Places.where(cols == task) if self.col >= 0 and task > 0 else Places.where(cols < 0),
            old_in=Places.where(cols < task) if self.col >= 0 else None,
        )
        # At task 0 everything along `row` is new, fixed sizes included.
        given = task == 0 and self.frozen
        self.rows = None if given else self._newborn(self.block.new_out.take(self.value, self.row))
        self.cols = None
        if self.col >= 0 and len(self.block.new_in) and len(self.block.old_out):
            part = self.block.old_out.take(self.value, self.row)
            self.cols = self._newborn(self.block.new_in.take(part, self.col))

    @staticmethod
    def _newborn(part: Tensor) -> nn.Parameter | None:
        return nn.Parameter(part.clone(memory_format=torch.contiguous_format)) if part.numel() else None

    def _place(self, old: Tensor, rows: Tensor, cols: Tensor) -> None:
        if self.col < 0:
            Places.where(rows).put(self.value, self.row, old)
            return
        keep = Places.where(rows)
        part = keep.take(self.value, self.row).clone()
        Places.where(cols).put(part, self.col, old)
        keep.put(self.value, self.row, part)

    # Values ----------------------------------------------------------------------------------------------------

    def _inputs(self) -> int:
        return max(1, self.value.numel() // max(1, self.value.shape[self.out])) if self.mixes else 1

    def _fill(self, value: Tensor) -> None:
        """Fresh values with the spread of the given network: weights around zero, other parameters around theirs."""
        spread, center, inputs = self.fresh.tolist()
        if self.mixes:
            value.normal_(0.0, spread * math.sqrt(inputs / self._inputs()))
        else:
            value.normal_(center, spread)
        if self.blank is not None:
            value[self.blank] = 0

    def sync(self) -> None:
        """Copy the newborn values into the whole."""
        self._write(self.value.data)

    def synced(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole with the newborn values in it, in a lower precision if asked for: its frozen part is converted once
        and kept, so that a step converts only the new."""
        own = self.value
        dtype = own.dtype if dtype is None or own.dtype == torch.float64 else dtype
        if dtype == own.dtype and not self.rank_births:
            if self.rows is not None and not len(self.block.old_out):  # all is newborn: nothing to copy
                return self.rows.data
            self.sync()
            return own
        # All of them are kept: a step that was recorded with one may be replayed after others were asked for.
        low = self._low.get((dtype, own.device))
        if low is None:
            self.sync()
            with torch.inference_mode(False), torch.no_grad():  # it is kept for steps that are not
                frozen = self._frozen() if self.rank_births else own
                low = self._low[dtype, own.device] = frozen.to(dtype)
        else:
            self._write(low.data)
        if self.folds_rank:
            self._fold(low.data)
        return low

    # Rank births ------------------------------------------------------------------------------------------------

    @property
    def folds_rank(self) -> bool:
        """Whether the rank birth that is being learned is part of the weight in a step: a convolution has few weights
        and many positions. A matrix has few positions: what goes through its rank birth is added to what comes out."""
        return self.value.dim() > 2 and self.newest_rank() is not None

    def low_rank(self) -> LowRank | None:
        """The rank birth that is being learned, as the operators want it."""
        birth = self.newest_rank()
        return None if birth is None else LowRank(birth.up, birth.down, self.folds_rank)

    def _with_steps(self, values: Tensor, upto: int, rows: Tensor, cols: Tensor) -> Tensor:
        """Add the steps of all rank births up to a task, oldest first, to values with these births, in place."""
        for key, birth in self.rank_births.items():
            if (number := int(key)) <= upto:
                assert isinstance(birth, RankBirth)
                self._add(values, birth, Places.where(rows < number), Places.where(cols < number))
        return values

    def _frozen(self) -> Tensor:
        """A copy of the whole as the task before the newest left it, newborn values included."""
        return self._with_steps(self.value.clone(), self.task - 1, self.row_births, self.col_births)

    def _add(self, values: Tensor, birth: RankBirth, rows: Places, cols: Places) -> None:
        front = values.movedim(self.row, 0)

        def give(first: int, step: Tensor) -> None:
            places = rows.index[first : first + len(step)].to(values.device)
            part = front.index_select(0, places)
            block = cols.take(part, self.col) if self.col >= 0 else part
            block = block + step.to(values).view_as(block)
            if self.col >= 0:
                cols.put(part, self.col, block)
            front.index_copy_(0, places, block if self.col < 0 else part)

        birth.step(give)

    def old_inputs(self, samples: Tensor) -> Tensor:
        """What the old block reads of samples of a layer's inputs (samples × inputs × kernel), as rows."""
        return (samples if self.block.old_in is None else self.block.old_in.take(samples, 1)).flatten(1)

    @torch.no_grad()
    def _fold(self, whole: Tensor) -> None:
        """Write the old block with the step that is being learned into a weight that a step of training reads."""
        birth = self.newest_rank()
        assert birth is not None
        if self._old is None:
            with torch.inference_mode(False):
                self._old = self._block(self._frozen()).clone()
        step = (birth.up.data @ birth.down.data).view(self._front_shape()).movedim(0, self.row)
        values = self._old + step
        rows, cols = self.block.old_out, self.block.old_in
        if cols is None:
            rows.put(whole, self.row, values)
        elif rows.start is not None and cols.start is not None:
            cols.put(rows.take(whole, self.row), self.col, values)
        else:
            part = rows.take(whole, self.row).clone()
            cols.put(part, self.col, values)
            rows.put(whole, self.row, part)

    def _block(self, whole: Tensor) -> Tensor:
        """What is older than the newest task."""
        part = self.block.old_out.take(whole, self.row)
        return part if self.block.old_in is None else self.block.old_in.take(part, self.col)

    def _front_shape(self) -> list[int]:
        """The shape of the old block with its outputs in front."""
        shape = list(self.value.shape)
        shape[self.row] = len(self.block.old_out)
        if self.block.old_in is not None:
            shape[self.col] = len(self.block.old_in)
        return [shape[self.row], *shape[: self.row], *shape[self.row + 1 :]]

    def _write(self, whole: Tensor) -> None:
        """Through `.data`: a forward between another forward and its backward writes the same values again, which must
        not look like a change to autograd."""
        if self.rows is not None:
            self.block.new_out.put(whole, self.row, self.rows.data)
        if self.cols is not None:
            if self.block.old_out.start is not None and self.block.new_in.start is not None:
                old = self.block.old_out.take(whole, self.row)
                self.block.new_in.put(old, self.col, self.cols.data)
            else:
                old = self.block.old_out.take(whole, self.row).clone()
                self.block.new_in.put(old, self.col, self.cols.data.to(old.dtype))
                self.block.old_out.put(whole, self.row, old)

    def _forget_low(self) -> None:
        self._low, self._old = {}, None

    def _apply(self, fn: Any, recurse: bool = True) -> GrowingTensor:
        self._forget_low()
        fresh = self.fresh
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.fresh.dtype != fresh.dtype:  # facts, not weights: they keep their precision
            self.fresh = fresh.to(self.fresh.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget_low()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_low": {}, "_old": None}

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.sync()
        super()._save_to_state_dict(*args, **kwargs)

    def at(self, task: int, *, lend: bool = False) -> Tensor:
        """The values that a task uses, as a contiguous copy. Whoever asks for an earlier task's writes nothing.

        What is lent may be our own, to be read before anything changes here."""
        out = self._born_by(task, lend=lend and not self.rank_births)
        if self.rank_births:
            rows, cols = self.row_births, self.col_births
            out = self._with_steps(out, task, rows[rows <= task], cols[cols <= task])
        return out.reshape(()) if self.scalar else out

    def _born_by(self, task: int, *, lend: bool = False) -> Tensor:
        """What was born up to a task, without rank births."""
        if task >= self.task:
            self.sync()
        if task >= self.youngest:
            return (
                self.value if lend and is_plain(self.value) else self.value.clone(memory_format=torch.contiguous_format)
            )
        chosen = [(self.row, self.row_births <= task)]
        if self.col >= 0:
            chosen.append((self.col, self.col_births <= task))
        return select(self.value, chosen)

    def whole(self) -> Tensor:
        """All values, with gradients flowing to the newborn parts."""
        self.sync()
        out = self._frozen()
        if self.cols is not None:
            old = self.block.old_out.take(out, self.row)
            old = old.index_copy(self.col, self.block.new_in.on(out.device), self.cols)
            out = out.index_copy(self.row, self.block.old_out.on(out.device), old)
        if self.rows is not None:
            out = out.index_copy(self.row, self.block.new_out.on(out.device), self.rows)
        if (birth := self.newest_rank()) is not None:
            step = (birth.up @ birth.down).view(self._front_shape()).movedim(0, self.row)
            old = self.block.old_out.take(out, self.row)
            where = self.block.old_in
            old = old + step if where is None else old.index_add(self.col, where.on(out.device), step)
            out = out.index_copy(self.row, self.block.old_out.on(out.device), old)
        return out.reshape(()) if self.scalar else out
