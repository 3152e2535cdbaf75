"""A tiny random checkpoint with a byte-level tokenizer and a chat template."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.models.checkpoints import write_random

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny(directory: Path, **options) -> Path:
    """Writes the checkpoint; its vocabulary is the 256 bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*SPECIAL, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    write_random(directory, vocab_size=len(vocab), **options)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return directory
