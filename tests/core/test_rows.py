"""The most that a request can need is what its rows take, or more."""

from __future__ import annotations

import pytest

from dflash_backend.core.request import Request, peak_positions, positions_to_start, prefill_row
from tests.core.toy_engine import make_config, make_request


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("base", [0, 1, None])
def test_what_must_be_free_to_start_covers_the_first_row_with_any_number_of_drafts(
    adaptive: bool, base: int | None
) -> None:
    """Where k drafts do not fit behind a prompt, fewer may: the window says so of each number by itself."""
    for num_tokens in range(1, 20):
        config = make_config(
            block_size=1, adaptive_speculation=adaptive, num_speculative_tokens=5, drafter_max_len=12,
            lookahead_base=base, max_model_len=40,
        )  # fmt: skip
        request = Request.from_generation_request(
            make_request("r", list(range(1, num_tokens + 1)), max_tokens=9), config, 0, 0.0
        )
        free, most = positions_to_start(request, config), peak_positions(request, config)
        for k in range(6) if adaptive else [5]:
            row = prefill_row(request, 0, num_tokens, config, k)
            assert row.num_positions <= min(free, most), (num_tokens, k)
