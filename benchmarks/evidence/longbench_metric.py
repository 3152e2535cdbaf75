"""LongBench's F1 of answers, and its prompts (Bai et al. 2024, MIT)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from models.tokenizer import TextTokenizer

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
PROMPTS = {
    "2wikimqa": _PASSAGES,
    "hotpotqa": _PASSAGES,
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:"
    ),
}
NEW_TOKENS = {"2wikimqa": 32, "hotpotqa": 32, "multifieldqa_en": 64}

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Lower case, then no ASCII punctuation, then no articles, then single spaces; in this order.

    The order matters: ``a.`` is an article once its full stop is gone.
    """
    text = answer.lower().translate(_PUNCTUATION)
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def f1(prediction: str, answer: str) -> float:
    """F1 of the words of a prediction and an answer, counted with their multiplicity."""
    mine, theirs = normalise(prediction).split(), normalise(answer).split()
    shared = sum((Counter(mine) & Counter(theirs)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(mine), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers that are accepted."""
    return max((f1(prediction, answer) for answer in answers), default=0.0)


def truncate_middle(text: str, tokenizer: TextTokenizer, limit: int) -> str:
    """The first and last half of ``limit`` tokens, where a text has more of them."""
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    if len(ids) <= limit:
        return text
    half = limit // 2
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[len(ids) - half :])
