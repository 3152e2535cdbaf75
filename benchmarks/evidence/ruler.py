"""RULER's needle-in-a-haystack tasks, built from any essay text and fitted to a length in tokens.

Tasks, wording and placement follow RULER (Hsieh et al. 2024, Apache-2.0). What differs: keys come
from the project's own word lists, sentences are split by a rule instead of NLTK, the length counts
the chat wrapper too, and a haystack grows by single words or lines.
"""

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence.words import ADJECTIVES, NOUNS
from models.tokenizer import TextTokenizer
from retopk_jax.errors import ConfigError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TASK = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"

DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, 40)))
"""Percentages of the haystack's sentences before a needle."""


@dataclass(frozen=True)
class Task:
    """A task of RULER.

    Attributes:
        haystack: ``essay``, ``noise`` or ``needle``.
        keys: kind of the keys, ``words`` or ``uuids``.
        values: kind of the values, ``numbers`` or ``uuids``.
        num_keys: keys hidden.
        num_values: values a key.
        num_queries: keys asked for.
    """

    haystack: str
    keys: str
    values: str
    num_keys: int
    num_values: int
    num_queries: int


TASKS = {
    "niah_single_1": Task("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": Task("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": Task("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": Task("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": Task("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": Task("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": Task("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": Task("essay", "words", "numbers", 4, 1, 4),
}

HEADLINE = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
"""Tasks whose mean is the headline score."""


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        tokens: of the wrapped prompt and the answer prefix.
        text: the same, as text.
        answers: expected in the answer.
        depths: percentage of the haystack before each of them.
    """

    tokens: list[int]
    text: str
    answers: list[str]
    depths: list[float]


@dataclass(frozen=True)
class Facts:
    """What one prompt hides and asks for.

    Attributes:
        needles: sentences, in the order in which they are hidden.
        answers: values asked for.
        at: place of each answer's sentence among the needles.
        query: the keys asked for, as the question names them.
    """

    needles: list[str]
    answers: list[str]
    at: list[int]
    query: str


def draw(kind: str, rng: random.Random) -> str:
    """A random key or value."""
    match kind:
        case "numbers":
            return str(rng.randint(1_000_000, 9_999_999))
        case "words":
            return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        case _:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_facts(task: Task, rng: random.Random, seed: int) -> Facts:
    """Keys, values and the question of one prompt."""
    keys = [draw(task.keys, rng) for _ in range(max(task.num_keys, task.num_queries))]
    values = [[draw(task.values, rng) for _ in range(task.num_values)] for _ in keys]
    hidden = [(k, v) for k in range(len(keys)) for v in range(task.num_values)]
    random.Random(seed).shuffle(hidden)  # the same order in every prompt, as in RULER
    needles = [NEEDLE.format(kind=task.values, key=keys[k], value=values[k][v]) for k, v in hidden]
    asked = rng.sample(range(len(keys)), task.num_queries)
    wanted = [(k, v) for k in asked for v in range(task.num_values)]
    names = [keys[k] for k in asked]
    query = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    return Facts(
        needles, [values[k][v] for k, v in wanted], [hidden.index(w) for w in wanted], query
    )


def sentences(text: str) -> list[str]:
    """Splits after a full stop, exclamation or question mark, or one closing quote after it."""
    return re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"')\u201d\u2019])\s+", text.strip())


def hide_in_text(
    words: list[str], count: int, needles: Sequence[str], rng: random.Random
) -> tuple[str, list[float]]:
    """The first ``count`` words, repeated if need be, with the needles between sentences.

    Returns:
        The text, and the depth of each needle.
    """
    repeated = [*words * (count // max(len(words), 1)), *words[: count % max(len(words), 1)]]
    parts = sentences(" ".join(repeated))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    total = len(parts)
    for needle, depth in reversed(list(zip(needles, depths, strict=True))):
        parts.insert(total * depth // 100, needle)
    return " ".join(parts), [float(depth) for depth in depths]


def hide_in_lines(
    lines: list[str], needles: Sequence[str], rng: random.Random
) -> tuple[str, list[float]]:
    """The lines with the needles before distinct ones of them.

    Returns:
        The text, and the depth of each needle.
    """
    places = sorted(rng.sample(range(len(lines)), len(needles)))
    kept = list(lines)
    for needle, place in reversed(list(zip(needles, places, strict=True))):
        kept.insert(place, needle)
    return "\n".join(kept), [100.0 * place / len(lines) for place in places]


def render(task: Task, facts: Facts, context: str) -> tuple[str, str]:
    """The request and the beginning of its answer; in the singular where one value is asked for."""
    kind, request, prefix = task.values, TASK, PREFIX
    if task.num_queries * task.num_values == 1:
        kind = kind[:-1]
        request = request.replace("Some", "A").replace("are all", "is").replace("are", "is")
        prefix = prefix.replace("are", "is")
    filled = {"kind": kind, "query": facts.query}
    return request.format(context=context, **filled), prefix.format(**filled)


class Builder:
    """Builds the prompts of one task at one length."""

    def __init__(self, task: str, essay: list[str], tokenizer: TextTokenizer, seed: int):
        self._task, self._essay, self._tokenizer, self._seed = TASKS[task], essay, tokenizer, seed
        if self._task.haystack == "essay" and not essay:
            raise ConfigError(f"{task} needs an essay text with words in it")

    def build(self, length: int, count: int, new_tokens: int) -> list[Sample]:
        """Prompts that leave room for the answer.

        Args:
            length: tokens of prompt, answer prefix and answer at most.
            count: prompts.
            new_tokens: of the answer.

        Raises:
            ConfigError: not even the smallest haystack fits.
        """
        room = length - new_tokens
        size = self._largest(lambda n: len(self._sample(n, 0).tokens) <= room)
        samples = []
        for index in range(count):
            fitted = size
            sample = self._sample(fitted, index)
            while len(sample.tokens) > room and fitted > self._least:
                fitted -= 1
                sample = self._sample(fitted, index)
            if len(sample.tokens) > room:
                raise ConfigError(
                    f"--lengths {length}: the task's own words take {len(sample.tokens)} tokens, "
                    f"and {new_tokens} are for the answer"
                )
            samples.append(sample)
        return samples

    @property
    def _least(self) -> int:
        """Words or lines of the smallest haystack."""
        return 1 if self._task.haystack == "essay" else self._task.num_keys * self._task.num_values

    def _largest(self, fits: Callable[[int], bool]) -> int:
        low, high = self._least, max(2 * self._least, 64)
        if not fits(low):
            return low
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _sample(self, size: int, index: int) -> Sample:
        """Prompt number ``index`` over a haystack of ``size`` words or lines."""
        rng = random.Random(f"{self._seed}/{index}")
        facts = draw_facts(self._task, rng, self._seed)
        placing = random.Random(f"{self._seed}/{index}/places")
        if self._task.haystack == "essay":
            context, depths = hide_in_text(self._essay, size, facts.needles, placing)
        else:
            lines = [NOISE] * size
            if self._task.haystack == "needle":
                lines = [
                    NEEDLE.format(
                        kind=self._task.values,
                        key=draw(self._task.keys, rng),
                        value=draw(self._task.values, rng),
                    )
                    for _ in range(size)
                ]
            context, depths = hide_in_lines(lines, facts.needles, placing)
        request, prefix = render(self._task, facts, context)
        if self._tokenizer.chat_template is None:
            text = request + prefix
        else:
            message = [{"role": "user", "content": request}]
            text = self._tokenizer.apply_chat_template(message) + prefix
        tokens = self._tokenizer.backend.encode(text, add_special_tokens=False).ids
        return Sample(tokens, text, facts.answers, [depths[at] for at in facts.at])


def clean(prediction: str) -> str:
    """A prediction as RULER's scoring takes it."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def hits(prediction: str, answers: Sequence[str]) -> list[bool]:
    """Which answers a prediction contains, whatever their case."""
    lowered = clean(prediction).lower()
    return [answer.lower() in lowered for answer in answers]


def string_match_all(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Mean over samples of the fraction of answers contained, in percent, two decimals."""
    shares = [
        sum(found) / len(found)
        for found in (hits(p, a) for p, a in zip(predictions, answers, strict=True))
    ]
    return round(100 * sum(shares) / len(shares), 2)
