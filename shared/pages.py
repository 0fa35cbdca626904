"""Page hashes: a keyed chain over (parent hash, token ids of the page), so equal hash means equal whole prefix.

The hash is BLAKE2b with a 16-byte digest (RFC 7693) under the cell's secret key: a client cannot construct collisions.
"""

from hashlib import blake2b

HASH_BYTES = 16
TOKEN_BYTES = 4


def root_hash(key: bytes, salt: str) -> bytes:
    """Parent of every first page under this salt; different salts never share a page."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES, key=key, person=b"quire-root").digest()


def page_hash(key: bytes, parent: bytes, page: bytes) -> bytes:
    """Hash of one full page. page: its token ids as an int32 column."""
    return blake2b(parent + page, digest_size=HASH_BYTES, key=key, person=b"quire-page").digest()


def page_hashes(key: bytes, root: bytes, tokens: bytes, page_tokens: int) -> bytes:
    """Hashes (page_hash) of all full pages of tokens (int32 column), concatenated."""
    step = page_tokens * TOKEN_BYTES
    fresh = blake2b(digest_size=HASH_BYTES, key=key, person=b"quire-page").copy  # cheaper than to begin anew for each page
    parent, out = root, []
    for start in range(0, len(tokens) - step + 1, step):
        page = fresh()
        page.update(parent + tokens[start : start + step])
        parent = page.digest()
        out.append(parent)
    return b"".join(out)
