"""Attention with sinks: a learned logit of each head that is once in every softmax, however contexts are split."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_paged_attention import Case


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1), (True, 20), (False, None), (False, 7)])
def test_a_sink_counts_once_for_any_pattern_and_number_of_splits(causal: bool, window: int | None, splits: int) -> None:
    Case([3, 2], [61, 7], sink=1.0).check(causal, window, splits)


@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 64), ((8, 1), 64), ((3, 1), 96), ((5, 1), 16), ((16, 8), 64)])
@pytest.mark.parametrize("splits", [1, 3])
def test_each_head_has_its_own_sink(heads: tuple[int, int], head_dim: int, splits: int) -> None:
    Case([2, 1], [37, 18], heads=heads, head_dim=head_dim, sink=0.0).check(True, None, splits)


@pytest.mark.parametrize("workers", [1, 3, 7, 20])
def test_tiles_that_workers_share_have_their_sinks_once(workers: int) -> None:
    """Whole tiles, and beginnings and ends of others, in one launch."""
    Case([3, 1, 5, 1], [100, 3, 61, 33], heads=(4, 2), sink=2.0).check_shares(workers, True, None)


def test_a_prefill_chunk_of_several_tiles_has_sinks() -> None:
    Case([70, 5], [90, 5], heads=(2, 1), sink=1.0).check(True, None, 1)
    Case([70, 5], [90, 5], heads=(2, 1), sink=1.0).check(True, 9, 3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sink", [-300.0, 300.0])
def test_a_sink_may_have_none_of_a_softmax_or_all_of_it(sink: float, splits: int) -> None:
    case = Case([3, 2], [61, 7], sink=sink)
    case.check(True, None, splits)
    assert bool(case.run(True, None, splits).any()) == (sink < 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_half_precision_within_its_rounding(dtype: torch.dtype, splits: int) -> None:
    Case([3, 1], [50, 35], dtype=dtype, head_dim=64, heads=(2, 1), sink=1.0).check(True, 20, splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_rows_and_tokens_between_rows_give_zeros(splits: int) -> None:
    case = Case([3, 2, 0, 3], [45, 20, 0, 3], query_bounds=[3] * 4, heads=(2, 1), sink=1.0)
    case.check(True, None, splits)
    assert not case.run(True, None, splits)[6:9].any()


@pytest.mark.parametrize("window", [None, 6])
def test_reference_equals_a_softmax_over_one_more_key_without_a_value(window: int | None) -> None:
    case = Case([4], [30], heads=(4, 2), block_size=8, sink=0.5)
    assert case.sinks is not None
    k, v = case.cache[case.rows.block_tables[0].long()].flatten(0, 1)[:30].double().unbind(1)
    expected = torch.zeros(4, 4, 16, dtype=torch.float64)
    for index, position in enumerate(range(26, 30)):
        first = 0 if window is None else position - window + 1
        for head in range(4):
            seen = slice(first, position + 1)
            weights = (k[seen, head // 2] @ case.query[index, head].double() / 4).exp()
            share = weights / (weights.sum() + case.sinks[head].double().exp())
            expected[index, head] = share @ v[seen, head // 2]
    torch.testing.assert_close(case.reference(True, window), expected.flatten(1))
