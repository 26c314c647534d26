"""Block hashes and lookups: what counts as the same prefix."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from dflash_backend.core.block_hashes import BlockHashes, hash_block, pack_tokens, root_hash
from dflash_backend.core.kv.block_pool import BlockPool


def _hashes(token_ids: list[int], salt: str = "", block_size: int = 2) -> list[bytes]:
    return list(BlockHashes(salt, block_size).first(len(token_ids) // block_size, token_ids))


def test_a_digest_covers_everything_before_it() -> None:
    ours, theirs = _hashes([1, 2, 3, 4, 5, 6]), _hashes([9, 2, 3, 4, 5, 6])
    assert all(a != b for a, b in zip(ours, theirs, strict=True))
    assert _hashes([1, 2, 3, 4, 5, 7])[:2] == ours[:2]
    assert _hashes([1, 2, 9, 4, 5, 6])[2] != ours[2], "also what lies between"


def test_a_digest_covers_the_token_behind_the_block_where_the_drafter_reads_it() -> None:
    def hashes(token_ids: list[int]) -> list[bytes]:
        return list(BlockHashes("", 2, reads_next_tokens=True).first(2, token_ids))

    ours = hashes([1, 2, 3, 4, 5])
    assert hashes([1, 2, 3, 4, 5, 6]) == ours
    assert hashes([1, 2, 3, 4, 9])[0] == ours[0], "the token behind the second is not that behind the first"
    assert hashes([1, 2, 3, 4, 9])[1] != ours[1]
    assert hashes([1, 2, 9, 4, 5])[0] != ours[0]
    chain = BlockHashes("", 2, reads_next_tokens=True)
    chain.first(1, [1, 2, 3])
    assert list(chain.first(2, [1, 2, 3, 4, 5])) == ours


def test_the_order_of_tokens_counts_and_equal_blocks_differ_by_place() -> None:
    assert _hashes([1, 2]) != _hashes([2, 1])
    first, second = _hashes([1, 2, 1, 2])
    assert first != second


def test_salts_never_share_a_digest() -> None:
    assert set(_hashes([1, 2, 3, 4], "a")).isdisjoint(_hashes([1, 2, 3, 4], "b"))
    assert root_hash("") != root_hash("a")


@given(salts=st.sets(st.text(st.characters(), max_size=8), min_size=2))
@example(salts={"", "é", "ü", "e", "\u0301e", "e\u0301", "漢", "🙂", "\ud800"})
@example(salts={"a", "a\0", "\0a", "A", "a ", " a", "\u0430"})
def test_salts_of_any_text_never_share_a_digest(salts: set[str]) -> None:
    """ISOLATE: two tenants' salts may differ in characters that an encoding drops or folds together."""
    assert len({root_hash(salt) for salt in salts}) == len(salts)
    chains = [_hashes([1, 2, 3, 4], salt) for salt in salts]
    assert len({block_hash for chain in chains for block_hash in chain}) == 2 * len(salts)


def test_digests_are_the_same_whenever_they_are_computed() -> None:
    tokens = list(range(10))
    chain = BlockHashes("s", 2)
    chain.first(1, tokens[:3])
    assert list(chain.first(5, tokens)) == _hashes(tokens, "s")


def test_a_large_token_id_does_not_collide() -> None:
    root = root_hash("")
    assert hash_block(root, pack_tokens([2**32])) != hash_block(root, pack_tokens([0]))


def _pool_with(token_ids: list[int], blocks: list[int]) -> BlockPool:
    pool = BlockPool(8)
    block_ids = pool.allocate(len(token_ids) // 2)
    hashes = _hashes(token_ids)
    for index in blocks:
        pool.publish(block_ids[index], hashes[index])
    return pool


def _find(pool: BlockPool, tokens: list[int], num_blocks: int) -> list[int]:
    return pool.find_chain(BlockHashes("", 2).first(num_blocks, tokens), num_blocks)


def test_the_longest_prefix_is_found_and_not_a_block_past_a_gap() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    assert _find(_pool_with(tokens, [0, 1, 2]), tokens, 3) == [0, 1, 2]
    assert _find(_pool_with(tokens, [0, 2]), tokens, 3) == [0]
    assert _find(_pool_with(tokens, [1, 2]), tokens, 3) == []


def test_a_lookup_stops_where_it_is_told() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    assert _find(_pool_with(tokens, [0, 1, 2]), tokens, 2) == [0, 1]
