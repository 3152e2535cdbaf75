"""A tiny model with random weights and a byte tokenizer: what ``--smoke`` runs without a model."""

from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models import CausalLM, ModelConfig, TextTokenizer, random_model

NAME = "random weights (smoke)"

_SPECIAL = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> TextTokenizer:
    """A token a byte, and the markers of a conversation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens(list(_SPECIAL))
    special = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    return TextTokenizer(backend, special, add_bos=False, chat_template=_TEMPLATE)


def smoke_model(seed: int = 0) -> CausalLM:
    """Two layers, four query heads on two key-value heads, 4,096 positions."""
    tokenizer = byte_tokenizer()
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": tokenizer.backend.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "eos_token_id": 257,
            "tie_word_embeddings": True,
        }
    )
    model = random_model(config, seed=seed)
    return replace(model, tokenizer=tokenizer, source=NAME)
