"""Roots and hash chains: what may share a prefix, and what may not."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from k3jax.cache import HashChain, ImageSpan, Root, check_cache_salt, image_digest
from k3jax.errors import RequestError

ROOT = Root("model")
OTHER = {
    "model": "another",
    "weight_version": 1,
    "tokenizer": "r2",
    "mla_dtype": "float8_e4m3",
    "mla_scales": ("1.5",),
    "state_dtype": "bfloat16",
    "conv_layout": "other",
    "layout_version": 2,
    "adapter": ("lora", 1),
    "cache_salt": "a",
    "trust_domain": "tenant",
}


def test_every_field_of_the_root_separates():
    roots = [ROOT] + [dataclasses.replace(ROOT, **{name: value}) for name, value in OTHER.items()]
    assert {f.name for f in dataclasses.fields(Root)} == set(OTHER)
    assert len({root.digest for root in roots}) == len(roots)
    hashes = {HashChain(root, 2, [1, 2]).hashes[0] for root in roots}
    assert len(hashes) == len(roots)


def test_no_two_roots_encode_alike():
    assert Root("ab", "c").digest != Root("a", "bc").digest
    assert Root("m", 1).digest != Root("m", "1").digest
    assert Root("m", adapter=("a", 1)).digest != Root("m", adapter=("a", 2)).digest


def test_the_salt_is_not_printed():
    assert "secret" not in repr(Root("model", cache_salt="secret"))


@pytest.mark.parametrize("salt", [1, "", True, b"a", ["a"], "x" * 257, "é" * 200])
def test_salts_of_a_wrong_type_are_refused(salt):
    """F025."""
    with pytest.raises(RequestError) as error:
        check_cache_salt(salt)
    assert error.value.field == "cache_salt"


@pytest.mark.parametrize("salt", [None, "a", "x" * 256])
def test_good_salts(salt):
    assert check_cache_salt(salt) == salt


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 7), st.data())
def test_a_chain_does_not_depend_on_how_it_grew(tokens, unit, data):
    whole = HashChain(ROOT, unit, tokens)
    grown = HashChain(ROOT, unit)
    rest = list(tokens)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        grown.extend(rest[:size])
        rest = rest[size:]
    assert grown.hashes == whole.hashes and list(grown.tokens) == tokens
    assert len(whole.hashes) == len(tokens) // unit  # complete units only


@given(st.lists(st.integers(0, 1), min_size=12, max_size=12), st.integers(0, 11))
def test_a_hash_stands_for_the_whole_prefix(tokens, changed):
    other = list(tokens)
    other[changed] += 2
    same = [
        a == b
        for a, b in zip(*(HashChain(ROOT, 3, t).hashes for t in (tokens, other)), strict=True)
    ]
    assert same == [unit < changed // 3 for unit in range(4)]


def test_copies_go_their_own_way():
    chain = HashChain(ROOT, 2, [1, 2, 3])
    copy = chain.copy()
    copy.extend([4])
    chain.extend([5])
    assert list(chain.tokens) == [1, 2, 3, 5] and list(copy.tokens) == [1, 2, 3, 4]
    assert chain.hashes[0] == copy.hashes[0] and chain.hashes[1] != copy.hashes[1]


@pytest.mark.parametrize("tokens", [[-1], [2**31]])
def test_ids_that_are_no_token_are_refused(tokens):
    with pytest.raises((ValueError, OverflowError)):
        HashChain(ROOT, 2, tokens)


def chain_with(*images, length=16):
    return HashChain(ROOT, 4, [9] * length, images).hashes


def test_images_separate_from_where_they_stand():
    """F019, T44: all image tokens carry one id; the digest of the pixels tells them apart."""
    red, blue = (
        image_digest(np.full((2, 2, 3), color, np.uint8), "patch 14")
        for color in ([255, 0, 0], [0, 0, 255])
    )
    first = chain_with(ImageSpan(red, 5, 6))
    assert first == chain_with(ImageSpan(red, 5, 6))
    other = chain_with(ImageSpan(blue, 5, 6))
    assert [a == b for a, b in zip(first, other, strict=True)] == [True, False, False, False]
    moved = chain_with(ImageSpan(red, 6, 6))
    assert [a == b for a, b in zip(first, moved, strict=True)] == [True, False, False, False]
    assert (
        chain_with(ImageSpan(red, 4, 4), ImageSpan(blue, 8, 4))[2]
        != chain_with(ImageSpan(red, 4, 8))[2]
    )


def test_images_and_growth():
    images = [ImageSpan(bytes([i]), 3 * i, 2) for i in range(8)]
    whole = HashChain(ROOT, 4, [9] * 24, images)
    grown = HashChain(ROOT, 4, (), images)
    for _ in range(24):
        grown.extend([9])
    assert grown.hashes == whole.hashes
    assert grown.copy().hashes == whole.hashes


def test_image_digests():
    pixels = np.zeros((2, 3, 3), np.uint8)
    digest = image_digest(pixels, "patch 14")
    assert digest == image_digest(pixels.copy(order="F"), "patch 14")
    assert digest != image_digest(pixels, "patch 16")
    assert digest != image_digest(pixels.reshape(3, 2, 3), "patch 14")
    pixels[1, 2, 0] = 1
    assert digest != image_digest(pixels, "patch 14")
    with pytest.raises(ValueError):
        image_digest(np.zeros((2, 3, 3)), "patch 14")
