"""The KV pool's shape, size and kinship with the native memory."""

from __future__ import annotations

import pytest
import torch

from baton.errors import ConfigError
from baton.layers.kv_pool import asked_pages, make_pool
from baton.layers.kv_spec import KVSpec, describe_heads


def spec_of(layers: int, heads: int, head_dim: int, page_tokens: int) -> KVSpec:
    group = describe_heads(
        range(layers), range(heads), head_dim, dtype="bfloat16", page_tokens=page_tokens
    )
    return KVSpec((group,))


SPEC = spec_of(3, 2, 8, page_tokens=4)
PAGE = 4 * 3 * 2 * 2 * 8 * 2


def test_page_is_one_span_of_page_bytes():
    kv = make_pool(SPEC, num_pages=5, native=False)
    assert kv.data.shape == (5, 3, 2, 4, 2, 8)
    assert (kv.page_bytes, kv.num_pages) == (PAGE, 5)
    assert kv.data[1].data_ptr() - kv.data[0].data_ptr() == PAGE
    assert kv.data[1].is_contiguous()


def test_pool_is_sized_by_tokens_or_else_by_mib():
    assert asked_pages(SPEC, max_total_tokens=103, kv_pool_mib=1) == 25
    assert asked_pages(SPEC, max_total_tokens=0, kv_pool_mib=1) == (1 << 20) // PAGE
    assert asked_pages(SPEC, max_total_tokens=0, kv_pool_mib=None) is None


def test_pages_of_a_draft_model_share_the_memory_that_is_divided():
    assert asked_pages(SPEC, 0, 1, draft_page_bytes=PAGE) == (1 << 19) // PAGE
    beside = asked_pages(SPEC, 0, 1, draft_page_bytes=PAGE, draft_scratch_bytes=1 << 19)
    assert beside == (1 << 18) // PAGE
    assert asked_pages(SPEC, 103, 1, PAGE, 1 << 19) == 25, "of a number of tokens nothing is taken"
    with pytest.raises(ConfigError, match=r"--kv-pool-mib 1 .* raise it to 3"):
        asked_pages(SPEC, 0, 1, draft_scratch_bytes=2 << 20)


@pytest.mark.parametrize(
    ("tokens", "mib", "words"),
    [(7, 1, "--max-total-tokens 7 .* raise it to 8"), (0, 1, "--kv-pool-mib 1 .* raise it to 3")],
)
def test_pool_below_two_pages_is_refused_with_what_would_do(tokens, mib, words):
    spec = SPEC if tokens else spec_of(32, 8, 128, page_tokens=12)
    with pytest.raises(ConfigError, match=words):
        asked_pages(spec, tokens, mib)


def test_native_memory_is_viewed_not_copied():
    native = pytest.importorskip("baton._native", reason="the native module is not built")
    if not hasattr(native, "KvPool"):
        pytest.skip("this build of the native module has no KvPool")
    kv = make_pool(SPEC, 5, native=True)
    assert kv.native.data_ptr == kv.data.data_ptr()
    kv.data[2, 1, 0, 3, 1, 7] = 1.0
    raw = torch.frombuffer(kv.native.buffer(), dtype=torch.uint8).view(torch.bfloat16)
    assert raw.count_nonzero() == 1
    assert raw[(((2 * 3 + 1) * 2 + 0) * 4 + 3) * 16 + 15] == 1.0
