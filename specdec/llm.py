"""LLM: the library's face. A target, perhaps a draft, and text in, text out; from any thread, or
from asyncio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias, overload

from specdec.assembly import ModelName, assemble
from specdec.config import EngineConfig, SamplingParams, build
from specdec.models.default_target import DEFAULT_TARGET
from specdec.outputs import Request, RequestOutput
from specdec.progress import batch_progress
from specdec.stats import DEFINITIONS

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
        progress: show progress bars while downloading, converting and generating. **options: fields
            of EngineConfig, such as num_draft_tokens=5, attention="auto", num_blocks=None.

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
        self._lock = threading.Lock()
        assembled = assemble(target, draft, self.config, tokenizer=tokenizer, progress=progress)
        self._engine = assembled.engine
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
        prompts: Sequence[str] | Sequence[Sequence[int]],
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
        single = _is_one(prompts)
        todo = [prompts] if single else list(prompts)
        each = _params_per_prompt(params, fields, len(todo))
        requests = self._add_all(todo, each)
        try:
            show = self._progress and not single
            with batch_progress(len(requests)) if show else nullcontext() as advance:
                self._run(requests, advance)
        except BaseException:
            self._abort_all(requests)
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
        """Yield the growing output after each step; leaving the loop early aborts the request."""
        (request,) = self._add_all([prompt], _params_per_prompt(params, fields, 1))
        try:
            seen = -1
            while True:
                seen, output = self._advance(request, seen)
                yield output
                if output.finished:
                    return
        finally:
            self._abort_all([request])

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio: steps run in worker threads, the event loop never waits."""
        each = _params_per_prompt(params, fields, 1)
        (request,) = await asyncio.to_thread(self._add_all, [prompt], each)
        try:
            seen = -1
            while True:
                seen, output = await asyncio.to_thread(self._advance, request, seen)
                yield output
                if output.finished:
                    return
        finally:
            if not request.finished:
                await asyncio.to_thread(self._abort_all, [request])

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
        with self._lock:
            return self._engine.abort(request_id)

    def stats(self) -> dict[str, Any]:
        """Counts, acceptance and seconds per phase since the start; `specdec.stats.DEFINITIONS`
        says what each means.
        """
        with self._lock:
            return self._engine.stats.as_dict()

    @staticmethod
    def stats_definitions() -> dict[str, str]:
        """What each figure of stats() counts."""
        return dict(DEFINITIONS)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, special tokens added as the tokenizer does."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; give prompts as token ids")
        return list(self.tokenizer.encode(text))

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; use generate() with a raw prompt")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _add_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Request]:
        """Queue all or, if one cannot be served, none."""
        encoded = [self.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        requests: list[Request] = []
        with self._lock:
            try:
                for prompt, ids, own in zip(prompts, encoded, params, strict=True):
                    text = prompt if isinstance(prompt, str) else None
                    requests.append(self._engine.add(ids, own, prompt=text))
            except ValueError as error:
                for request in requests:
                    self._engine.abort(request.request_id)
                where = f"prompt {len(requests)}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        return requests

    def _run(self, requests: Sequence[Request], advance: Any) -> None:
        """Step until all are finished. The lock is free between steps, so other threads add, abort
        and read.
        """
        pending = list(requests)
        while pending:
            with self._lock:
                if not all(request.finished for request in pending):
                    self._engine.step()
            left = [request for request in pending if not request.finished]
            if advance is not None:
                advance(len(pending) - len(left), self._engine.stats)
            pending = left

    def _advance(self, request: Request, seen: int) -> tuple[int, RequestOutput]:
        """Step until the request has more than `seen` tokens or is finished."""
        while True:
            with self._lock:
                count = sum(sample.seq.num_output_tokens for sample in request.samples)
                if count > max(seen, 0) or request.finished:
                    return count, request.output()
                self._engine.step()

    def _abort_all(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self._engine.abort(request.request_id)


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a text, token ids, or a list of these, got {prompts!r}")
    return len(prompts) > 0 and isinstance(prompts[0], int)


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
    if len(params) != count:
        raise ValueError(
            f"{count} prompts but {len(params)} SamplingParams; give one, or one per prompt"
        )
    return list(params)
