"""Page hashes: equal exactly when the key, the salt and the whole prefix are."""

from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from shared.columns import i32
from shared.pages import HASH_BYTES, page_hash, page_hashes, root_hash

KEY = b"key of this cell"
tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=100)


def test_the_definition_does_not_drift() -> None:
    """Workers keep hashes across a scheduler's restart: a changed definition would silently empty every cache."""
    root = blake2b(b"salt", digest_size=16, key=KEY, person=b"quire-root").digest()
    page = i32(range(16))
    assert root_hash(KEY, "salt") == root
    assert page_hash(KEY, root, page) == blake2b(root + page, digest_size=16, key=KEY, person=b"quire-page").digest()
    assert root_hash(KEY, "salt").hex() == "6c0bfb50d589a032e57265c94c40f58e"
    assert page_hash(KEY, root, page).hex() == "6722ae09f7cd1f1537fb053875524f2b"


@given(tokens_of, st.sampled_from([16, 32, 64]))
def test_one_hash_per_full_page_each_on_top_of_the_one_before(tokens: list[int], page_tokens: int) -> None:
    root = root_hash(KEY, "")
    hashes = page_hashes(KEY, root, i32(tokens), page_tokens)
    assert len(hashes) == len(tokens) // page_tokens * HASH_BYTES
    parent = root
    for number in range(len(tokens) // page_tokens):
        page = i32(tokens[number * page_tokens : (number + 1) * page_tokens])
        parent = page_hash(KEY, parent, page)
        assert hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES] == parent


@given(st.lists(st.integers(0, 5), min_size=64, max_size=64), st.integers(0, 63), st.integers(6, 9))
def test_a_changed_token_changes_its_page_and_every_later_one(tokens: list[int], position: int, other: int) -> None:
    root = root_hash(KEY, "")
    changed = [*tokens[:position], other, *tokens[position + 1 :]]
    before, after = (page_hashes(KEY, root, i32(each), 16) for each in (tokens, changed))
    for page in range(4):
        same = before[page * HASH_BYTES : (page + 1) * HASH_BYTES] == after[page * HASH_BYTES : (page + 1) * HASH_BYTES]
        assert same == (page < position // 16)


def test_another_salt_or_key_shares_nothing() -> None:
    tokens = i32([7] * 64)
    chains = [page_hashes(key, root_hash(key, salt), tokens, 16) for key in (KEY, b"another") for salt in ("", "a", "b")]
    single = [chain[at : at + HASH_BYTES] for chain in chains for at in range(0, len(chain), HASH_BYTES)]
    assert len(set(single)) == len(single)  # equal pages at other places differ too


def test_a_prefix_keeps_its_hashes_when_the_text_grows() -> None:
    root, tokens = root_hash(KEY, ""), list(range(1000))
    whole = page_hashes(KEY, root, i32(tokens), 16)
    for length in (0, 15, 16, 17, 500, 999):
        assert whole.startswith(page_hashes(KEY, root, i32(tokens[:length]), 16))
