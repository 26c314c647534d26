"""The distribution that a row samples from: its logits at a temperature, filtered by min-p, top-k and top-p.

Each filter keeps the tokens from some logit on, so all that has to be found is that logit. The reference sorts; the
kernel searches, since sorting a large vocabulary costs more than reading it a dozen times, and since a search needs no
memory beside. Tokens with equal logits are kept or hidden together, so the result does not depend on how something was
sorted.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None

# Elements that a program reads at a time, and its warps: it reads a whole row, many times, from the cache.
TILE = 8192
WARPS = 16


def filtered_softmax_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    any_top_k_or_p: bool = True,
    any_min_p: bool = True,
) -> torch.Tensor:
    """Probabilities of `logits` (`[n, vocab]`, any floating-point dtype): float32, 0 for tokens that are filtered out.

    temperature (above 0), top_p (1: all), min_p (0: all): float32 `[n]`. top_k (0: all): int64 `[n]`. The flags say
    whether any row needs the step. The order is vLLM's: temperature, min-p, top-k, top-p; what is left is renormalised.
    """
    scaled = logits.float() / temperature[:, None]
    if any_min_p:
        probs = scaled.softmax(dim=-1)
        threshold = probs.amax(dim=-1, keepdim=True) * min_p[:, None]
        scaled = scaled.masked_fill(probs < threshold, float("-inf"))
    if any_top_k_or_p:
        scaled = scaled.masked_fill(scaled < _lowest_kept(scaled, top_k, top_p), float("-inf"))
    return scaled.softmax(dim=-1)


def _lowest_kept(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit that is kept, `[n, 1]`: the k-th largest or, if higher, the highest at which the probability of
    all from it on reaches p."""
    ordered = logits.sort(dim=-1, descending=True).values
    vocab = logits.shape[-1]
    last = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab) - 1
    kth = ordered.gather(1, last[:, None])
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    above = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    above[:, 0] = 0.0
    # A p of 1 keeps everything, whatever rounding does to the sum.
    hidden = (above >= top_p[:, None]) & (top_p[:, None] < 1.0)
    return torch.maximum(kth, ordered.masked_fill(hidden, float("inf")).amin(dim=-1, keepdim=True))


if triton is not None:

    @triton.jit
    def _tile(row_ptr, base, vocab, BLOCK: tl.constexpr):
        """A tile of a row's logits, -inf past the vocabulary."""
        offsets = base + tl.arange(0, BLOCK)
        return tl.load(row_ptr + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float32)

    @triton.jit
    def _weight(logits, top, scale):
        """Proportional to the probability, 1 for the largest logit. `scale` is log2(e) over the temperature."""
        return tl.exp2((logits - top) * scale)

    @triton.jit
    def _ends(row_ptr, vocab, BLOCK: tl.constexpr):
        """The lowest logit above -inf, and the largest of all."""
        low = tl.full([BLOCK], float("inf"), tl.float32)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for base in range(0, vocab, BLOCK):
            logits = _tile(row_ptr, base, vocab, BLOCK)
            top = tl.maximum(top, logits)
            low = tl.minimum(low, tl.where(logits > float("-inf"), logits, float("inf")))
        return tl.min(low, axis=0), tl.max(top, axis=0)

    @triton.jit
    def _total(row_ptr, vocab, lowest_kept, top, scale, BLOCK: tl.constexpr):
        """The weights of all logits from `lowest_kept` on, and the lowest of these."""
        total = tl.zeros([BLOCK], tl.float32)
        low = tl.full([BLOCK], float("inf"), tl.float32)
        for base in range(0, vocab, BLOCK):
            logits = _tile(row_ptr, base, vocab, BLOCK)
            kept = logits >= lowest_kept
            total += tl.where(kept, _weight(logits, top, scale), 0.0)
            low = tl.minimum(low, tl.where(kept, logits, float("inf")))
        return tl.sum(total, axis=0), tl.min(low, axis=0)

    @triton.jit
    def _order(value):
        """Floats as integers in the same order."""
        bits = value.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    @triton.jit
    def _middle(low, high, turn):
        """A number from `low` to below `high`: in turn halfway between the values, where logits are spread evenly, and
        between their places among all floats, which bounds the number of turns."""
        by_value = low * 0.5 + high * 0.5
        first, last = _order(low).to(tl.int64), _order(high).to(tl.int64)
        place = ((first + last) >> 1).to(tl.int32)
        by_place = tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)
        middle = tl.where(turn % 2 == 0, by_value, by_place)
        return tl.where((middle >= low) & (middle < high), middle, low)

    @triton.jit
    def _search(row_ptr, vocab, low, high, target, top, scale, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
        """The lowest logit above which lies less than `target`: tokens or, `WEIGHTED`, weight. It is one from `low` to
        `high`, which are logits of the row; both ends stay such, so each turn brings them closer."""
        turn = 0
        while low < high:
            middle = _middle(low, high, turn)
            found = tl.zeros([BLOCK], tl.float32)
            above = tl.full([BLOCK], float("inf"), tl.float32)
            below = tl.full([BLOCK], float("-inf"), tl.float32)
            for base in range(0, vocab, BLOCK):
                logits = _tile(row_ptr, base, vocab, BLOCK)
                is_above = logits > middle
                weight = 1.0
                if WEIGHTED:
                    weight = _weight(logits, top, scale)
                found += tl.where(is_above, weight, 0.0)
                above = tl.minimum(above, tl.where(is_above, logits, float("inf")))
                below = tl.maximum(below, tl.where(is_above, float("-inf"), logits))
            if tl.sum(found, axis=0) < target:
                high = tl.max(below, axis=0)
            else:
                low = tl.min(above, axis=0)
            turn += 1
        return low

    @triton.jit
    def _filtered_softmax_kernel(
        logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, vocab, stride, BLOCK: tl.constexpr
    ):  # fmt: skip
        """One program finds the lowest logit that is kept of one row, and writes its probabilities."""
        row = tl.program_id(0).to(tl.int64)
        row_ptr = logits_ptr + row * stride
        temperature = tl.load(temperature_ptr + row)
        scale = 1.4426950408889634 / temperature
        low, top = _ends(row_ptr, vocab, BLOCK)
        lowest_kept = low
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            lowest_kept = _search(row_ptr, vocab, low, top, top_k.to(tl.float32), top, scale, False, BLOCK)
        if min_p > 0.0:
            lowest_kept = tl.maximum(lowest_kept, top + temperature * tl.log(min_p))
        if top_p < 1.0:
            total, low = _total(row_ptr, vocab, lowest_kept, top, scale, BLOCK)
            lowest_kept = _search(row_ptr, vocab, low, top, top_p * total, top, scale, True, BLOCK)
        total, _ = _total(row_ptr, vocab, lowest_kept, top, scale, BLOCK)
        for base in range(0, vocab, BLOCK):
            logits = _tile(row_ptr, base, vocab, BLOCK)
            probs = tl.where(logits >= lowest_kept, _weight(logits, top, scale) / total, 0.0)
            offsets = base + tl.arange(0, BLOCK)
            tl.store(out_ptr + row * vocab + offsets, probs, mask=offsets < vocab)

    def filtered_softmax(
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        tile: int = TILE,
    ) -> torch.Tensor:
        """As `filtered_softmax_reference`, up to rounding, which matters where a token lies on the edge of a filter.

        Rows of `logits` must be contiguous. A row's result depends on nothing but the row."""
        num_rows, vocab = logits.shape
        out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
        if num_rows > 0:
            _filtered_softmax_kernel[(num_rows,)](
                logits, temperature, top_k, top_p, min_p, out, vocab, logits.stride(0), BLOCK=tile, num_warps=WARPS
            )
        return out
