"""Metrics against cases worked out by hand."""

import math

import numpy as np
import pytest

from benchmarks.evidence.longbench_metric import f1, normalise, qa_f1, truncate_middle
from benchmarks.evidence.ruler import clean, hits, string_match_all
from benchmarks.evidence.smoke_model import byte_tokenizer
from benchmarks.evidence.statistics import paired_difference, paired_points, perplexity


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The  Cat, the hat!", "cat hat"),
        ("a.", ""),  # punctuation goes first: what is left is an article
        ("A.B.", "ab"),  # and is none here
        ("anthem theatre", "anthem theatre"),  # whole words only
        ("x-ray", "xray"),
        ("“the” — quoted", "“ ” — quoted"),  # ASCII punctuation only
        ("", ""),
    ],
)
def test_normalisation_follows_the_stated_order(answer, expected):
    assert normalise(answer) == expected


def test_f1_counts_words_with_their_multiplicity():
    assert f1("red red blue", "red blue blue") == pytest.approx(2 / 3)
    assert f1("the Netherfield Park.", "Netherfield") == pytest.approx(2 * 0.5 / 1.5)
    assert f1("", "") == 0.0
    assert f1("a", "the") == 0.0


def test_qa_f1_takes_the_best_answer():
    assert qa_f1("nearly twenty", ["forty", "twenty", "nearly twenty"]) == 1.0
    assert qa_f1("x", []) == 0.0


def test_truncation_keeps_both_ends():
    tokenizer = byte_tokenizer()
    assert truncate_middle("abcdefghij", tokenizer, 5) == "abij"
    assert truncate_middle("abcde", tokenizer, 5) == "abcde"


def test_every_value_counts_and_case_does_not():
    assert hits("It is 12, and ABC-d.", ["12", "abc-D", "7"]) == [True, True, False]
    assert string_match_all(["1 2", "none"], [["1", "2", "3", "4"], ["9"]]) == 25.0
    assert string_match_all(["1", "2", "x"], [["1"], ["2"], ["3"]]) == 66.67


def test_control_characters_part_a_prediction():
    assert clean(" 12\x003\x1f ") == "12\n3"


def test_perplexity_weighs_tokens_not_documents():
    assert perplexity([3 * math.log(2), 3 * math.log(8)], 6) == pytest.approx(4.0)


def test_difference_is_that_of_the_pooled_perplexities():
    mine, other = [10.0, 12.0, 11.0], [9.0, 12.5, 10.0]
    found = paired_difference(mine, other, 20, seed=0)
    expected = 100 * (perplexity(mine, 60) / perplexity(other, 60) - 1)
    assert found["percent"] == pytest.approx(expected)
    assert found["documents_worse"] == 2
    assert found["low"] < found["percent"] < found["high"]
    assert paired_difference(mine, other, 20, seed=0) == found


def test_interval_of_equal_differences_has_no_width():
    found = paired_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0], 10, seed=1)
    assert found["low"] == pytest.approx(found["high"]) == pytest.approx(found["percent"])
    assert found["percent"] == pytest.approx(100 * math.expm1(0.1))


def test_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        drawn = rng.normal(0.02, 0.05, 40) * 10
        found = paired_difference(drawn.tolist(), [0.0] * 40, 10, seed=trial)
        inside += found["low"] <= 100 * math.expm1(0.02) <= found["high"]
    assert 0.88 <= inside / 200 <= 0.99


def test_points_are_paired_within_every_task():
    scores, reference = [[100.0, 0.0], [50.0, 50.0, 50.0]], [[0.0, 0.0], [40.0, 40.0, 40.0]]
    found = paired_points(scores, reference, 0)
    assert found["points"] == pytest.approx((50 + 10) / 2)
    assert found["low"] == pytest.approx((0 + 10) / 2)  # of two samples, drawn twice alike
    assert found["high"] == pytest.approx((100 + 10) / 2)
    same = paired_points(reference, reference, 0)
    assert same == {"points": 0.0, "low": 0.0, "high": 0.0}
