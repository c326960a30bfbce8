"""LLM: the library's face. A target, perhaps a draft, and text in, text out; from any thread, or
from asyncio.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias, overload

from specdec.assembly import assemble
from specdec.config import EngineConfig, SamplingParams, build
from specdec.driver import Driver, Query
from specdec.model_pair import ModelName
from specdec.models.default_target import DEFAULT_TARGET
from specdec.outputs import Request, RequestOutput
from specdec.progress import batch_progress

Prompt: TypeAlias = str | Sequence[int]  # text, or token ids
Message = dict[str, str]  # {"role": ..., "content": ...}


class LLM:
    """A target language model with speculative decoding.

    Args:
        target: alias (`smollm2-135m`), folder, hub id, GGUF file, or a loaded transformers model
            (used in place).
        draft: the same, for a small model of the same vocabulary; None drafts from the text itself
            (n-gram lookup).
        tokenizer: replaces the target's own.
        progress: show progress bars while downloading, converting and generating.
        options: fields of EngineConfig, such as num_draft_tokens=5, attention="auto" or
            num_blocks=None.

    All methods may be called from several threads at once: whoever waits runs the next step for
    all.
    """

    def __init__(
        self,
        target: ModelName = DEFAULT_TARGET,
        draft: ModelName | None = None,
        *,
        tokenizer: Any = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        self.config: EngineConfig = build(EngineConfig, options)
        self._progress = progress
        assembled = assemble(target, draft, self.config, tokenizer=tokenizer, progress=progress)
        self._driver = Driver(assembled.engine)
        self.tokenizer = assembled.tokenizer
        self.description = assembled.description

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Complete one prompt (one result) or many (a list in the same order, with a progress bar).

        `params` holds for all prompts or is a list of one per prompt; **fields builds it in place:
        generate("...", temperature=0). A request that fails while running has `error` set; wrong
        input raises ValueError before anything is queued.
        """
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # numpy, torch
        single = _is_one(prompts)
        todo = [prompts] if single else list(prompts)
        each = _params_per_prompt(params, fields, len(todo))
        requests = self._driver.add(self._queries(todo, each))
        try:
            show = self._progress and not single
            with batch_progress(len(requests)) if show else nullcontext() as advance:
                self._driver.run(requests, advance)
        except BaseException:
            self._driver.abort_all(requests)
            raise
        outputs = [request.output() for request in requests]
        return outputs[0] if single else outputs

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **fields: Any
    ) -> RequestOutput:
        """Answer a conversation, formatted by the tokenizer's chat template."""
        return self.generate(self.chat_token_ids(messages), params, **fields)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> Iterator[RequestOutput]:
        """Yield the growing output after each step that emits; leaving early aborts."""
        queries = self._queries([prompt], _params_per_prompt(params, fields, 1))
        (request,) = self._driver.add(queries)
        try:
            seen = 0
            while True:
                seen, output = self._driver.advance(request, seen)
                yield output
                if output.finished:
                    return
        finally:
            self._driver.abort_all([request])

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio: steps run in worker threads, the event loop never waits."""
        each = _params_per_prompt(params, fields, 1)
        owned: list[Request] = []  # what must be aborted if this task is cancelled
        cancelled = threading.Event()

        def add() -> None:
            owned.extend(self._driver.add(self._queries([prompt], each)))
            if cancelled.is_set():
                self._driver.abort_all(owned)

        try:
            await asyncio.to_thread(add)
            (request,) = owned
            seen = 0
            while True:
                seen, output = await asyncio.to_thread(self._driver.advance, request, seen)
                yield output
                if output.finished:
                    return
        finally:
            cancelled.set()
            self._driver.abort_all(owned)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> RequestOutput:
        """`generate` of one prompt for asyncio; concurrent calls share the engine's batch."""
        last: RequestOutput | None = None
        async for output in self.astream(prompt, params, **fields):
            last = output
        assert last is not None
        return last

    def abort(self, request_id: str) -> bool:
        """End a request of another thread; it keeps what it has. False if unknown or ended
        already.
        """
        return self._driver.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Counts, acceptance and seconds per phase since the start; `specdec.stats.DEFINITIONS`
        says what each means.
        """
        return self._driver.stats()

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, special tokens added as the tokenizer does."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; give prompts as token ids")
        try:
            return list(self.tokenizer.encode(text))
        except (TypeError, UnicodeError) as error:  # half a surrogate pair
            raise ValueError(f"the prompt is not valid Unicode text: {error}") from None

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; use generate() with a raw prompt")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _queries(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Query]:
        """Tokenise text prompts; token ids stay as they are."""
        return [
            Query(self.encode(p), own, p) if isinstance(p, str) else Query(_token_ids(p), own)
            for p, own in zip(prompts, params, strict=True)
        ]


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts must be a text, token ids, or a list of these, got {prompts!r}")
    if len(prompts) == 0:
        return False
    first = prompts[0]
    is_number = hasattr(first, "__index__") and getattr(first, "ndim", 0) == 0
    return is_number or isinstance(first, float)  # a float is refused as a token, with its reason


def _token_ids(prompt: Any) -> list[int]:
    """Token ids as plain ints; numpy's integers are taken, booleans and floats are not."""
    found = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        if isinstance(found, bytes) or any(isinstance(token, bool) for token in found):
            raise TypeError
        return [operator.index(token) for token in found]
    except TypeError:
        raise ValueError(
            f"a prompt must be a text or a list of token ids, got {prompt!r}"
        ) from None


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, fields: dict[str, Any], count: int
) -> list[SamplingParams]:
    if fields:
        if params is not None:
            raise ValueError("give either params or single fields, not both")
        params = build(SamplingParams, fields)
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"params must be SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        raise ValueError(
            f"{count} prompts but {len(params)} SamplingParams; give one, or one per prompt"
        )
    return list(params)
