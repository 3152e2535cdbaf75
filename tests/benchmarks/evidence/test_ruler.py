"""Prompts of the needle tasks: needles there, where they are said to be, and within the length."""

import random
import re

import pytest

from benchmarks.evidence.ruler import (
    DEPTHS,
    TASKS,
    Builder,
    draw_facts,
    hide_in_lines,
    hide_in_text,
    render,
    sentences,
)
from benchmarks.evidence.smoke_model import byte_tokenizer
from benchmarks.evidence.words import ADJECTIVES, NOUNS
from retopk_jax.errors import ConfigError

TOKENIZER = byte_tokenizer()
ESSAY = " ".join(f"Sentence number {n} says little." for n in range(400)).split()
KINDS = {
    "numbers": r"[1-9]\d{6}",
    "words": r"[a-z]+-[a-z]+",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


@pytest.mark.parametrize("length", [2048, 3000])
@pytest.mark.parametrize("name", list(TASKS))
def test_needles_are_there_at_their_depths_and_prompts_fit(name, length):
    task = TASKS[name]
    samples = Builder(name, ESSAY, TOKENIZER, seed=3).build(length, 4, 100)
    for sample in samples:
        assert len(sample.tokens) <= length - 100
        assert TOKENIZER.backend.encode(sample.text, add_special_tokens=False).ids == sample.tokens
        assert len(sample.answers) == task.num_values * task.num_queries
        body = sample.text.partition("afterwards.\n")[2].rpartition("\nWhat ")[0]
        for answer, depth in zip(sample.answers, sample.depths, strict=True):
            assert re.fullmatch(KINDS[task.values], answer)
            needle = re.search(rf"One of the special magic \w+ for \S+ is: {answer}\.", body)
            assert needle is not None
            assert sample.text.count(answer) == 1
            # Needles before it move it down a little.
            slack = 100 * 4 * len(needle[0]) / len(body) + 4
            assert abs(100 * needle.start() / len(body) - depth) < slack
    # Nothing much longer would have fitted.
    longest = max(len(sample.tokens) for sample in samples)
    assert longest > length - 100 - (50 if task.haystack == "essay" else 150)
    assert len({sample.text for sample in samples}) == 4


def test_the_same_seed_gives_the_same_prompts():
    build = [
        [s.text for s in Builder("niah_multiquery", ESSAY, TOKENIZER, seed).build(2048, 2, 100)]
        for seed in (1, 1, 2)
    ]
    assert build[0] == build[1] != build[2]


@pytest.mark.parametrize("depth", [0, 50, 100])
def test_a_needle_lies_between_the_sentences_of_its_depth(depth, monkeypatch):
    monkeypatch.setattr("benchmarks.evidence.ruler.DEPTHS", (depth,))
    words = ["A", "b.", "C", "d.", "E", "f.", "G", "h."]
    text, depths = hide_in_text(words, 8, ["NEEDLE."], random.Random(0))
    expected = {
        0: "NEEDLE. A b. C d. E f. G h.",
        50: "A b. C d. NEEDLE. E f. G h.",
        100: "A b. C d. E f. G h. NEEDLE.",
    }
    assert text == expected[depth]
    assert depths == [depth]


def test_a_short_essay_is_repeated():
    text, _ = hide_in_text(["One.", "Two."], 5, ["X."], random.Random(0))
    assert [word for word in text.split() if word != "X."] == [
        "One.",
        "Two.",
        "One.",
        "Two.",
        "One.",
    ]


def test_needles_lie_before_distinct_lines():
    text, depths = hide_in_lines([f"l{n}" for n in range(10)], ["n0", "n1"], random.Random(5))
    lines = text.split("\n")
    assert [line for line in lines if line.startswith("l")] == [f"l{n}" for n in range(10)]
    for needle, depth in zip(("n0", "n1"), depths, strict=True):
        assert lines[lines.index(needle) + 1] == f"l{round(depth / 10)}"


def test_depths_are_forty_from_start_to_end():
    assert (len(DEPTHS), DEPTHS[0], DEPTHS[-1]) == (40, 0, 100)


def test_one_value_is_asked_for_in_the_singular():
    facts = draw_facts(TASKS["niah_single_2"], random.Random(0), 0)
    request, prefix = render(TASKS["niah_single_2"], facts, "(text; Some are)")
    assert request.startswith("A special magic number is hidden within the following text.")
    assert f"What is the special magic number for {facts.query} mentioned" in request
    assert "(text; Some are)" in request
    assert prefix.endswith("mentioned in the provided text is")
    many = draw_facts(TASKS["niah_multivalue"], random.Random(0), 0)
    request, prefix = render(TASKS["niah_multivalue"], many, "")
    assert "What are all the special magic numbers for" in request
    assert prefix.startswith(" The special magic numbers for")
    assert prefix.endswith("are")


def test_several_queries_are_joined_with_a_final_and():
    facts = draw_facts(TASKS["niah_multiquery"], random.Random(0), 0)
    assert len(facts.answers) == 4
    assert re.fullmatch(r"\S+, \S+, \S+, and \S+", facts.query)


def test_a_length_below_the_tasks_own_words_is_refused():
    with pytest.raises(ConfigError, match="--lengths 300: the task's own words take"):
        Builder("niah_single_2", ESSAY, TOKENIZER, 0).build(300, 1, 100)


def test_sentences_keep_their_quotes():
    text = 'He said "No." She left! Why? (So.) 3.5 is a number.'
    assert sentences(text) == ['He said "No."', "She left!", "Why?", "(So.)", "3.5 is a number."]


def test_word_lists_are_sorted_and_single():
    for words in (ADJECTIVES, NOUNS):
        assert words == sorted(set(words))
        assert all(re.fullmatch("[a-z]+", word) for word in words)
    assert len(ADJECTIVES) * len(NOUNS) > 30_000
