"""How small masks become when the bits that a weight has for several tasks are one symbol of a Huffman code."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from zeroforget.methods.bitmasks import BitMasks

SYMBOL = 7
"""So many tasks' bits are one symbol, as in WSN's paper; more tasks take several codes."""
LENGTH = 8
"""Bits that the length of a code word takes in the code's table: canonical codes follow from their lengths."""


def code_lengths(counts: Sequence[int]) -> list[int]:
    """How long each symbol's code word is, given how often each comes (Huffman's algorithm); 0: it never does."""
    heap = [(count, place, [place]) for place, count in enumerate(counts) if count]
    lengths = [0] * len(counts)
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
        return lengths
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, _, left), (b, place, right) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in left + right:
            lengths[symbol] += 1
        heapq.heappush(heap, (a + b, place, left + right))
    return lengths


@torch.no_grad()
def coded_bits(masks: BitMasks) -> int | None:
    """What all tasks' masks occupy, coded, the codes' tables included; None while the newest holds nothing."""
    packed = list(masks.buffers())
    if not packed or packed[-1].is_meta or not packed[-1].any():
        return None
    total = 0
    for first in range(0, masks.tasks, SYMBOL):
        tasks = range(first, min(first + SYMBOL, masks.tasks))
        symbols = torch.zeros(masks.count, dtype=torch.uint8, device=packed[0].device)
        for place, task in enumerate(tasks):
            symbols += torch.cat([m.flatten() for m in masks.read(task).values()]).to(torch.uint8) << place
        counts = torch.bincount(symbols.int(), minlength=2 ** len(tasks)).tolist()
        total += sum(n * length for n, length in zip(counts, code_lengths(counts), strict=True))
        total += LENGTH * len(counts)
    return total
