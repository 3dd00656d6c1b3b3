"""Tokenizer and incremental detokeniser against the goldens, and damaged files."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat.tokenizer import (
    Detokenizer,
    Tokenizer,
    load_tokenizer,
    shipped_tokenizer,
    split_long_text,
)
from k3jax.errors import CheckpointError, RequestError
from tests.chat.vocabulary import BYTES, write_tokenizer

TINY = shipped_tokenizer()


GOLDEN = Path(__file__).parents[1] / "golden/chat"


def golden_cases(argument: str, file: str, key: str = "cases"):
    """Parametrises a test over the cases of a golden file."""
    cases = json.loads((GOLDEN / file).read_text())[key]
    return pytest.mark.parametrize(argument, cases, ids=[case["id"] for case in cases])


text_cases = golden_cases("case", "tokenizer.json")
long_cases = golden_cases("case", "detokenize.json", "long_texts")


@text_cases
def test_ids_of_text(case):
    assert TINY.encode(case["text"]) == case["ids_ordinary_tiny"]
    assert TINY.encode(case["text"], special=True) == case["ids_special_tiny"]


@text_cases
def test_ids_of_text_with_the_real_ranks(case, kimi_tokenizer):
    assert kimi_tokenizer.encode(case["text"]) == case["ids_ordinary_kimi"]
    assert kimi_tokenizer.encode(case["text"], special=True) == case["ids_special_kimi"]


@text_cases
def test_decoding_gives_the_text_back(case):
    assert TINY.decode(TINY.encode(case["text"])) == case["text"]
    assert TINY.decode(TINY.encode(case["text"], special=True)) == case["text"]


@golden_cases("case", "detokenize.json")
def test_text_as_it_is_released(case):
    detokenizer = Detokenizer(TINY)
    parts = [detokenizer.feed([token_id]) for token_id in case["ids_tiny"]]
    assert parts == case["expected_parts"]
    assert detokenizer.finish() == case["expected_at_finish"]


LONG_TEXTS = {"L1": "a" * 60_000, "L2": " " * 30_001 + "x", "L3": "ab " * 140_000}


def check_long_text(tokenizer: Tokenizer, case: dict, vocabulary: str) -> None:
    ids = tokenizer.encode(LONG_TEXTS[case["id"]])
    assert len(ids) == case[f"n_{vocabulary}"]
    assert ids[:4] == case[f"first_{vocabulary}"]
    assert ids[-4:] == case[f"last_{vocabulary}"]
    assert sum(ids) == case[f"sum_{vocabulary}"]


@long_cases
def test_long_text(case):
    check_long_text(TINY, case, "tiny")


@long_cases
def test_long_text_with_the_real_ranks(case, kimi_tokenizer):
    check_long_text(kimi_tokenizer, case, "kimi")


def split_by_counting(text: str) -> list[str]:
    """The rule of the splitting, character by character."""
    pieces = []
    for start in range(0, len(text), 400_000):
        run, begin, counter, space = text[start : start + 400_000], 0, 0, None
        for position, char in enumerate(run):
            counter = counter + 1 if char.isspace() == space else 1
            space = char.isspace()
            if counter == 25_001:
                pieces.append(run[begin:position])
                begin, counter = position, 1
        pieces.append(run[begin:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "a" * 25_000,
        "a" * 25_001,
        "a" * 50_001 + "\x1f\u2003" * 20_000 + "b",
        "x \n" * 9_000 + " " * 60_000,
        "a" * 400_001,
        "a" * 399_999 + " " * 25_002,
    ],
    ids=["fits", "one_more", "unicode_space", "mixed", "run_edge", "class_change_at_run_edge"],
)
def test_cuts_of_long_text(text):
    assert list(split_long_text(text)) == split_by_counting(text)


@pytest.mark.parametrize(
    "text",
    ["a" * 1_000_000, "^" * 1_000_000, "漢" * 200_000, " " * 1_000_000, "\n" * 300_000],
    ids=["letters", "punctuation", "han", "spaces", "newlines"],
)
def test_one_long_run_takes_linear_time(text):
    start = time.perf_counter()
    ids = TINY.encode(text)
    assert time.perf_counter() - start < 10
    assert TINY.min_tokens(text) <= len(ids)
    assert TINY.decode(ids) == text


def test_a_control_token_of_a_long_special_text_is_never_cut():
    ids = TINY.encode("<|media_pad|>" * 20_000, special=True)
    assert ids == [TINY.special_ids["<|media_pad|>"]] * 20_000


def test_slots_and_stop_ids_of_k3():
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>"}
    names |= {5: "<|sep|>", 8: f"<|reserved_token_{TINY.n_base + 8}|>", 255: "[PAD]"}
    for slot, name in names.items():
        assert TINY.special_ids[name] == TINY.n_base + slot
    assert TINY.vocab_size == 1_024
    assert TINY.stop_token_ids == {TINY.n_base + 1, TINY.n_base + 2}
    assert TINY.missing_chat_tokens == ()


def test_real_files(kimi_tokenizer):
    assert (kimi_tokenizer.n_base, kimi_tokenizer.vocab_size) == (163_584, 163_840)
    assert kimi_tokenizer.stop_token_ids == {163_585, 163_586}
    assert kimi_tokenizer.special_ids["<|media_pad|>"] == 163_605


def test_only_marked_specials_are_skipped():
    ids = [65, TINY.special_ids["[PAD]"], TINY.special_ids["<|sep|>"], TINY.n_base + 8, 66]
    assert TINY.decode(ids, skip_special_tokens=True) == "A<|sep|>B"
    assert TINY.decode(ids) == f"A[PAD]<|sep|><|reserved_token_{TINY.n_base + 8}|>B"


def test_a_control_token_ends_a_character():
    pad = TINY.special_ids["[PAD]"]
    assert TINY.decode([0xE6, 0xBC, pad, 0xA2], skip_special_tokens=True) == "\ufffd\ufffd"


def test_an_id_without_meaning_does_not_break_the_text():
    assert TINY.decode([65, 5_000, -1, 66]) == "A\ufffd\ufffdB"
    with pytest.raises(RequestError, match="5000"):
        TINY.token_bytes(5_000)


def test_lone_surrogates_are_encoded():
    assert TINY.decode(TINY.encode("a\ud800b")) == "a\ufffdb"


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, TINY.vocab_size - 1), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    skip=st.booleans(),
)
def test_text_does_not_depend_on_the_cuts(ids, cuts, skip):
    detokenizer = Detokenizer(TINY, skip_special_tokens=skip)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    parts = [detokenizer.feed(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert "".join(parts) + detokenizer.finish() == TINY.decode(ids, skip_special_tokens=skip)


# ---- other vocabularies and damaged files


def test_kimi_linear_names_load_without_chat(tmp_path):
    names = {1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>"}
    folder = write_tokenizer(tmp_path, names=names, generation={"eos_token_id": 258})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_token_ids == {257, 258}
    assert tokenizer.encode("a<|im_end|>", special=True) == [97, 258]
    with pytest.raises(RequestError, match=r"<\|open\|>, <\|close\|>, <\|sep\|>") as refused:
        tokenizer.require_chat()
    assert refused.value.field == "messages"


@pytest.mark.parametrize("eos", ["<|done|>", {"content": "<|done|>"}, {}, 3, None, ["x"]])
def test_stop_id_of_the_tokenizer_config(tmp_path, eos):
    config = {"added_tokens_decoder": {"299": {"content": "<|done|>"}}, "eos_token": eos}
    stops = load_tokenizer(write_tokenizer(tmp_path, config=config)).stop_token_ids
    assert stops == ({299} if "done" in str(eos) else set())


def test_several_stop_ids(tmp_path):
    folder = write_tokenizer(tmp_path, generation={"eos_token_id": [258, 300]})
    assert load_tokenizer(folder).stop_token_ids == {258, 300}


DAMAGED_RANKS = {
    "not_base64": ([*BYTES[:9], "??? 9", *BYTES[10:]], "line 10"),
    "no_rank": ([*BYTES[:9], "CQ==", *BYTES[10:]], "line 10"),
    "rank_no_number": ([*BYTES[:9], "CQ== nine", *BYTES[10:]], "line 10"),
    "token_twice": ([*BYTES, "AA== 256"], "line 257"),
    "rank_twice": ([*BYTES, "QUE= 7"], "line 257.*line 8"),
    "rank_gap": ([*BYTES, "QUE= 300"], "line 257.*300"),
    "negative_rank": ([*BYTES, "QUE= -1"], "line 257"),
    "truncated": (BYTES[:100], "0x64"),
    "empty_token": ([*BYTES, " 256"], "line 257"),
}


@pytest.mark.parametrize("lines, where", DAMAGED_RANKS.values(), ids=DAMAGED_RANKS.keys())
def test_damaged_ranks(tmp_path, lines, where):
    with pytest.raises(CheckpointError, match=where) as refused:
        load_tokenizer(write_tokenizer(tmp_path, ranks=lines))
    assert refused.value.file == str(tmp_path / "tiktoken.model")


DAMAGED_CONFIGS = {
    "not_json": ("{\n  nope", "line 2"),
    "a_list": ("[]", "object"),
    "not_utf8_safe_depth": ("[" * 100_000, "JSON"),
    "slot_below": ({"added_tokens_decoder": {"255": {"content": "x"}}}, "255.*256..511"),
    "slot_above": ({"added_tokens_decoder": {"512": {"content": "x"}}}, "512"),
    "slot_no_number": ({"added_tokens_decoder": {"two": {"content": "x"}}}, "two"),
    "no_content": ({"added_tokens_decoder": {"256": {}}}, "256"),
    "name_twice": (
        {"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}},
        "256 and 257",
    ),
    "name_of_another_slot": (
        {"added_tokens_decoder": {"256": {"content": "<|reserved_token_300|>"}}},
        "another",
    ),
}


@pytest.mark.parametrize("config, what", DAMAGED_CONFIGS.values(), ids=DAMAGED_CONFIGS.keys())
def test_damaged_config(tmp_path, config, what):
    with pytest.raises(CheckpointError, match=what) as refused:
        load_tokenizer(write_tokenizer(tmp_path, config=config))
    assert refused.value.file == str(tmp_path / "tokenizer_config.json")


@pytest.mark.parametrize("eos", [512, -1, "2", True, [258, None]])
def test_damaged_generation_config(tmp_path, eos):
    with pytest.raises(CheckpointError, match=r"eos_token_id.*generation_config\.json"):
        load_tokenizer(write_tokenizer(tmp_path, generation={"eos_token_id": eos}))


@pytest.mark.parametrize("missing", ["tiktoken.model", "tokenizer_config.json"])
def test_missing_file(tmp_path, missing):
    write_tokenizer(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
        load_tokenizer(tmp_path)


def test_importing_chat_does_not_import_jax():
    program = "import sys, k3jax.chat, k3jax.engine.request; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=GOLDEN.parents[2])
