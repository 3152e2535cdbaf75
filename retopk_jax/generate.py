"""Generation: prompts in, text out, with any attention method."""

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retopk_jax.attention import AttentionMethod, PathStatistics, ReTopK
from retopk_jax.attention.checks import check_integer
from retopk_jax.decode import (
    DecodeState,
    Produced,
    check_tail_queries,
    decode_loop,
    decode_one,
    first_token,
    start,
    statistics,
)
from retopk_jax.device_memory import check_memory
from retopk_jax.errors import ConfigError, PromptError
from retopk_jax.language_model import LanguageModel
from retopk_jax.prefill import (
    Context,
    Prefilled,
    check_context,
    check_prompts,
    context_bytes,
    extend,
    prefill,
    slots_after,
)
from retopk_jax.programs import program
from retopk_jax.sampling import make_sampling
from retopk_jax.sharding import HEADS, check_method, on_every_host, shards_of

OnText = Callable[[int, str], None]
"""Called with (row, new text) as soon as the text is known."""


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    Attributes:
        text: the continuation, without the token or stop string that ended it; None without a
            tokenizer.
        tokens: ids of the continuation, the token that ended it included.
        prompt_tokens: tokens of the prompt.
        finish_reason: ``"eos"``, ``"stop"`` or ``"length"``.
        paths: how its head-steps were served; None for methods with one path.
        tokens_attended: tokens that a head of a layer attended to, mean over its decode steps.
        key_bytes: keys, or what stands for them while ranking, read in a decode step, mean.
        value_bytes: values read in a decode step, mean.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    paths: PathStatistics | None
    tokens_attended: float
    key_bytes: float
    value_bytes: float


@dataclass(frozen=True)
class Generation:
    """Continuations of a batch of prompts.

    Attributes:
        completions: one a prompt, in order.
        context: to generate from again: the one given, or without one the prompts as they were
            read.
        prefill_seconds: wall time of reading the prompts; a context given is not read.
        decode_seconds: wall time of the decode steps.
        compile_seconds: wall time of compilation, part of neither.
        decode_steps: decode steps run, those of the longest row.
        capacity: tokens a row of the cache in which they ran.
    """

    completions: list[Completion]
    context: Context
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    decode_steps: int
    capacity: int

    @property
    def texts(self) -> list[str | None]:
        """Text of every completion."""
        return [completion.text for completion in self.completions]

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of every completion."""
        return [completion.tokens for completion in self.completions]

    @property
    def tokens_per_second(self) -> float:
        """Tokens that decode steps produced, a second; each row's first is the prefill's."""
        decoded = sum(max(len(c.tokens) - 1, 0) for c in self.completions)
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


Prompts = str | Sequence[str] | Sequence[Sequence[int]]
"""One text, several texts, or the token ids of several prompts."""


def encode_prompts(
    model: LanguageModel, prompts: Prompts, *, begins: bool = True
) -> list[list[int]]:
    """Token ids of every prompt; ``begins`` says that they begin sequences.

    Raises:
        PromptError: an empty prompt, or a text where the model has no tokenizer.
    """
    listed: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    encoded = []
    for row, prompt in enumerate(listed):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise PromptError(
                    f"prompt {row} is text and the model has no tokenizer: give token ids"
                )
            ids = model.tokenizer.encode(prompt, begins=begins)
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError:
                raise PromptError(
                    f"prompt {row} is {prompt!r:.60}: expected a text or a list of token ids"
                ) from None
        if not ids:
            raise PromptError(f"prompt {row} is empty: expected at least one token")
        encoded.append(ids)
    return encoded


def generate(
    model: LanguageModel,
    prompts: Prompts | None = None,
    *,
    context: Context | None = None,
    donate: bool = False,
    attention: AttentionMethod | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    capacity: int | None = None,
    on_text: OnText | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """Reads prompts and continues them, after a context where one is given.

    Args:
        model: from `models.load_model`.
        prompts: a text, texts, or token ids of several prompts; of any lengths. None to continue
            a context as it is.
        context: what was read before the prompts: of one row, which every prompt follows, or of a
            row a prompt. It is not read again, and any number of generations may share it.
        donate: use the context's own cache where it suffices, so that nothing is copied; go on
            with `Generation.context`, not with the context passed in.
        attention: the decode-time method; None for `ReTopK` with its defaults.
        max_new_tokens: tokens to produce at most, of every prompt.
        temperature: 0 for greedy.
        top_k: likeliest tokens to draw from; 0 for all.
        top_p: probability mass to draw from.
        seed: of the sampler; row r draws with its own stream.
        stop: texts that end a row; they are cut off.
        ignore_eos: produce `max_new_tokens` whatever the model says.
        capacity: tokens a row of the cache; None for the least that fits, rounded up.
        on_text: called with (row, new text) while decoding.
        progress: called with (tokens read, tokens in all) while prefilling.

    Raises:
        PromptError: an empty prompt, a token id outside the vocabulary, or other rows than the
            context's.
        CapacityError: context, prompt and new tokens do not fit the capacity, the model's positions
            or the device.
        ConfigError: a setting is out of range, or the context kept too few queries for the method,
            was read by another model, or was donated.
    """
    method = ReTopK() if attention is None else attention
    method.check(model.decoder.geometry)
    check_method(method.name, method.shards, model.decoder.mesh)
    sampling = make_sampling(temperature, top_k, top_p)
    check_integer("max_new_tokens", max_new_tokens, minimum=1)
    check_integer("seed", seed, minimum=0, maximum=2**63 - 1)
    _check_stop(model, stop, on_text)
    read = _read(model, method, prompts, context, max_new_tokens, capacity, donate, progress)
    lengths = np.array(on_every_host(read.context.cache.lengths))  # a copy: the cache is donated
    state = start(method, read.context, mesh=model.decoder.mesh)
    eos = [-1] if ignore_eos else sorted(model.eos_token_ids) or [-1]
    controls = (sampling, jnp.asarray(eos, jnp.int32), jnp.int32(max_new_tokens))
    produced = Produced(
        jnp.zeros((len(lengths), _buffer(max_new_tokens)), jnp.int32),
        jnp.zeros(len(lengths), jnp.int32),
        jax.random.key(seed),
    )
    produced, state = first_token(produced, state, read.context.logits, *controls)
    turn = decode_loop if not stop and on_text is None else decode_one
    args = (method, model.params, state, produced, *controls)
    run, compile_seconds = program(turn, *args, decoder=model.decoder)
    watcher = _Watcher(model, len(lengths), stop, on_text, eos)
    jax.block_until_ready(state)
    began = time.perf_counter()
    if turn is decode_loop:
        produced, state = run(method, model.params, state, produced, *controls)
    else:
        state = watcher.look(produced, state)
        while bool(jnp.any(state.active)):
            produced, state = run(method, model.params, state, produced, *controls)
            state = watcher.look(produced, state)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    if context is None:
        cache = replace(state.cache, lengths=jnp.asarray(lengths))
        context = replace(read.context, cache=cache)
    elif jax.tree.leaves(context.cache)[0].is_deleted():
        context = context.in_cache_of(state.cache)
    return Generation(
        _completions(model, method, produced, state, lengths, eos, watcher),
        context,
        read.seconds,
        seconds,
        compile_seconds + read.compile_seconds,
        int(jnp.max(state.index)),
        state.cache.capacity,
    )


def _read(
    model: LanguageModel,
    method: AttentionMethod,
    prompts: Prompts | None,
    context: Context | None,
    new_tokens: int,
    capacity: int | None,
    donate: bool,
    progress: Callable[[int, int], None] | None,
) -> Prefilled:
    """Checks everything against the model and the device, then reads; see `generate`."""
    decoder = model.decoder
    if context is not None:
        check_context(decoder, context)
        check_tail_queries(method, context)
        tail = context.tail_queries[0].shape[1]
        tokens: list[list[int]] = [[]] * context.cache.batch
        if prompts is not None:
            tokens = encode_prompts(model, prompts, begins=False)
        slots = slots_after(decoder, context, tokens, new_tokens, capacity, donate=donate)
    elif prompts is not None:
        tail, tokens = method.tail_queries, encode_prompts(model, prompts)
        slots = check_prompts(decoder, tokens, new_tokens, capacity)
    else:
        raise PromptError("prompts=None and context=None: expected one of them, or both")
    rows = len(tokens)
    state = method.state_bytes(decoder.geometry, rows, slots, decoder.dtype)
    state //= shards_of(decoder.mesh, HEADS)
    in_place = donate and context is not None and context.cache.sizes == (rows, slots)
    parts = {} if in_place else context_bytes(decoder, rows, slots, tail)
    check_memory(f"{method.name} with {rows} x {slots} tokens", {**parts, "its own state": state})
    if context is None:
        return prefill(
            model,
            tokens,
            new_tokens=new_tokens,
            capacity=slots,
            tail_queries=tail,
            progress=progress,
        )
    return extend(
        model,
        context,
        tokens,
        new_tokens=new_tokens,
        capacity=slots,
        donate=donate,
        progress=progress,
    )


def _buffer(tokens: int) -> int:
    """Columns for new tokens: a power of two, so that few programs are compiled."""
    return max(64, 1 << (tokens - 1).bit_length())


def _check_stop(model: LanguageModel, stop: Sequence[str], on_text: OnText | None) -> None:
    if isinstance(stop, str) or any(not text for text in stop):
        raise ConfigError(f"stop={stop!r}: expected a list of texts, none of them empty")
    if (stop or on_text is not None) and model.tokenizer is None:
        raise PromptError("stop and on_text need text, and the model has no tokenizer")


class _Watcher:
    """Turns new tokens into text as they come, and ends rows at their stop strings."""

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        stop: Sequence[str],
        on_text: OnText | None,
        eos: Sequence[int],
    ):
        self._tokenizer = model.tokenizer
        self._eos = eos
        self._stop = list(stop)
        self._on_text = on_text
        self._shown = [0] * batch
        self._seen = [0] * batch
        self.stopped: dict[int, str] = {}

    def look(self, produced: Produced, state: DecodeState) -> DecodeState:
        """Shows what is new; returns the state with stopped rows ended."""
        if self._tokenizer is None:
            return state
        tokens, counts = np.asarray(produced.tokens), np.asarray(produced.count)
        active = np.array(state.active)
        for row, count in enumerate(counts):
            if count == self._seen[row] or row in self.stopped:
                continue
            self._seen[row] = int(count)
            ids = tokens[row, :count].tolist()
            text = self._tokenizer.decode(ids[:-1] if ids[-1] in self._eos else ids)
            cut = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
            ended = not active[row]
            if cut >= 0:
                text, ended = text[:cut], True
                self.stopped[row] = text
                active[row] = False
            self._show(row, text, ended)
        return replace(state, active=jnp.asarray(active))

    def _show(self, row: int, text: str, ended: bool) -> None:
        """Emits the text that later tokens cannot change: no part of a character or a stop."""
        safe = len(text)
        if not ended:
            while safe > self._shown[row] and text[safe - 1] == "�":
                safe -= 1
            for stop in self._stop:
                for size in range(min(len(stop) - 1, safe), 0, -1):
                    if text[:safe].endswith(stop[:size]):
                        safe -= size
                        break
        if self._on_text is not None and safe > self._shown[row]:
            self._on_text(row, text[self._shown[row] : safe])
        self._shown[row] = max(self._shown[row], safe)


def _completions(
    model: LanguageModel,
    method: AttentionMethod,
    produced: Produced,
    state: DecodeState,
    lengths: np.ndarray,
    eos: list[int],
    watcher: _Watcher,
) -> list[Completion]:
    tokens, counts = map(np.asarray, on_every_host((produced.tokens, produced.count)))
    paths = statistics(method, state)
    usage = on_every_host(state.usage)
    means = [np.asarray(x) for x in (usage.tokens, usage.key_bytes, usage.value_bytes)]
    completions = []
    for row, count in enumerate(counts):
        ids = tokens[row, :count].tolist()
        ended = bool(ids) and ids[-1] in eos
        reason = "stop" if row in watcher.stopped else "eos" if ended else "length"
        text = None
        if row in watcher.stopped:
            text = watcher.stopped[row]
        elif model.tokenizer is not None:
            text = model.tokenizer.decode(ids[:-1] if ended else ids)
        completions.append(
            Completion(
                text,
                ids,
                int(lengths[row]),
                reason,
                None if paths is None else paths[row],
                *(float(mean[row]) for mean in means),
            )
        )
    return completions
