"""Sizes, flags and the split of memory between the pools."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from k3jax.cache import CacheSettings, parse_retention_interval, split_memory
from k3jax.cache.settings import RETENTION_VARIABLE
from k3jax.errors import ConfigError

WRONG = {
    "only_the_reserved_page": {"num_pages": 1},
    "only_the_reserved_slot": {"num_slots": 1},
    "ids_beyond_int32": {"num_pages": 2**31},  # F006, F007
    "no_unit": {"match_unit": 0},
    "unit_and_page": {"page_size": 64, "match_unit": 48},
    "alignment": {"match_unit": 64, "kda_chunk": 48, "scheduler_alignment": 64},
    "interval": {"retention_interval": -1},
    "interval_type": {"retention_interval": True},
    "interval_word": {"retention_interval": "Dense"},
    "exports": {"exports_per_segment": -1},
    "pins": {"max_pinned_fraction": 1.5},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_contradictions_name_the_setting(change):
    with pytest.raises(ConfigError, match=next(reversed(change))):
        CacheSettings(**({"num_pages": 10, "num_slots": 4} | change))


def test_three_sizes_are_apart():
    sizes = CacheSettings(10, 4, page_size=8, match_unit=16, kda_chunk=64)
    assert (sizes.page_size, sizes.match_unit, sizes.scheduler_alignment) == (8, 16, 64)
    assert CacheSettings(10, 4, page_size=64, match_unit=16, kda_chunk=24).scheduler_alignment == 48
    assert CacheSettings(10, 4, scheduler_alignment=128).scheduler_alignment == 128
    assert "9 pages" in sizes.describe()


def test_unset_retention():
    assert CacheSettings(10, 4).retention_interval == 0
    assert CacheSettings(10, 4, draft_drops_last_unit=True).retention_interval == "dense"


def test_the_retention_flag():
    assert parse_retention_interval(None, environ={}) is None
    assert parse_retention_interval("dense", environ={}) == "dense"
    assert parse_retention_interval("512", environ={RETENTION_VARIABLE: "dense"}) == 512
    with pytest.warns(DeprecationWarning, match="--prefix-cache-retention-interval"):
        assert parse_retention_interval(None, environ={RETENTION_VARIABLE: "0"}) == 0


@pytest.mark.parametrize("text", ["None", "-1", "1.5", "", "٣"])
def test_other_words_are_refused(text):
    with pytest.raises(ConfigError, match="retention"):
        parse_retention_interval(text, environ={})


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(0, 10**9), st.integers(64, 10**5))
def test_the_split_fills_the_memory(slot_bytes, page_bytes, more, length):
    total = 2 * slot_bytes + 2 * page_bytes + more
    pages, slots = split_memory(
        total, slot_bytes=slot_bytes, page_bytes=page_bytes, expected_request_len=length
    )
    assert pages >= 2 and slots >= 2
    used = pages * page_bytes + slots * slot_bytes
    assert total - page_bytes < used <= total


def test_the_split_of_the_release():
    """449 MB a state, 27 648 B a token: both pools run out at the same number of requests."""
    pages, slots = split_memory(
        100 * 10**9, slot_bytes=449 * 10**6, page_bytes=64 * 27648, expected_request_len=8192
    )
    assert abs(slots / 2 - pages * 64 / 8192) < 2


def test_no_room_at_all():
    with pytest.raises(ConfigError, match="smallest"):
        split_memory(100, slot_bytes=40, page_bytes=20)
