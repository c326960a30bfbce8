"""What a request gives back: token ids, text, log-probabilities, counts. Incremental text and stop
strings live here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from specdec.sequence import Sequence
from specdec.stats import SpecStats

CHARACTER_TOKENS = 4  # UTF-8 has up to 4 bytes a character, so as many tokens
REPLACEMENT = "�"  # what half a UTF-8 character decodes to


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that output needs."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's raw log-probabilities at one token, before penalties, bias, temperature and
    truncation.
    """

    token_id: int
    logprob: float
    top: dict[int, float]  # the best ids asked for, best first


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    seed: int  # sample this alone again with SamplingParams(seed=..., num_draft_tokens=lookahead)
    lookahead: int | None  # the K that a sampled text depends on; None for a greedy one
    finish_reason: str | None  # stop | length | abort | error; None while running
    stop_reason: int | str | None  # the end token or stop string
    logprobs: list[TokenLogprobs] | None
    stats: dict[str, Any]
    origins: list[str]  # per token: accepted | recovered | bonus | plain


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request so far, or, with `finished`, as it ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None  # for each prompt token but the first
    finished: bool
    error: str | None  # why it failed; the other requests are not affected
    seconds: float  # since it was added
    seconds_to_first_token: float | None

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids."""
        return self.outputs[0].token_ids

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class TextStream:
    """Turns token ids into text, and finds stop strings, also across steps.

    Without stop strings tokens wait undecoded until `text` is asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_tail: Seq[int],
        stop: Seq[str] = (),
        *,
        include_stop_text: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop_text = include_stop_text
        self._skip = skip_special_tokens
        self._token_ids = list(prompt_tail)  # context: a word's leading space depends on it
        self._prefix = 0  # decoding starts here
        self._read = len(self._token_ids)  # text up to here is in `_text`
        self._text = ""

    @property
    def text(self) -> str:
        """The text so far; a tail of half a character is held back. Raises what the tokenizer
        raises.
        """
        if self._tokenizer is not None and self._read < len(self._token_ids):
            self._extend(final=False)
        return self._text

    @property
    def decoded(self) -> str:
        """The text as far as it was asked for."""
        return self._text

    @property
    def looks_for_stops(self) -> bool:
        """Whether `push` may report a stop string."""
        return bool(self._stop) and self._tokenizer is not None

    def extend(self, token_ids: Seq[int]) -> None:
        """Add tokens that no stop string is looked for in."""
        self._token_ids += token_ids

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token; return the stop string that it completes, if any. The text then ends before
        (or with) it.
        """
        self._token_ids.append(token_id)
        if not self.looks_for_stops:
            return None
        old = len(self._text)
        self._extend(final=False)
        return self._cut(old) if may_stop and len(self._text) > old else None

    def finish(self, *, may_stop: bool = False) -> str | None:
        """Put out what was held back as half a character; the stop string that this completes, as
        in `push`.
        """
        if self._tokenizer is None:
            return None
        old = len(self._text)
        self._extend(final=True)
        return self._cut(old) if may_stop and len(self._text) > old else None

    @property
    def safe_length(self) -> int:
        """Length of the text that no later token can take back: a tail that may begin a stop string
        is left out.
        """
        text, longest = self.text, 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return len(text) - longest

    def _extend(self, *, final: bool) -> None:
        """Decode what waits; but for `final`, up to the last token that ends with a whole
        character.
        """
        assert self._tokenizer is not None
        ids = self._token_ids
        before = self._tokenizer.decode(
            ids[self._prefix : self._read], skip_special_tokens=self._skip
        )
        for end in range(len(ids), max(self._read, len(ids) - CHARACTER_TOKENS), -1):
            after = self._tokenizer.decode(ids[self._prefix : end], skip_special_tokens=self._skip)
            if final or not after.endswith(REPLACEMENT):
                self._text += after[len(before) :]
                self._prefix, self._read = self._read, end
                return

    def _cut(self, old: int) -> str | None:
        """The earliest stop string that ends in the new text."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self._text = self._text[: at + len(stop) if self._include_stop_text else at]
        self._read = self._prefix = len(self._token_ids)
        return stop


@dataclass(eq=False, slots=True)
class Sample:
    """A sequence with what belongs to its output."""

    seq: Sequence
    text: TextStream
    stats: SpecStats = field(default_factory=SpecStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def output(self, index: int) -> CompletionOutput:
        seq = self.seq
        wants_logprobs = seq.params.logprobs is not None
        if seq.finish_reason == "error":
            text = self.text.decoded
        elif seq.finish_reason:
            text = self.text.text
        else:
            text = self.text.text[: self.text.safe_length]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=seq.token_ids[seq.num_prompt_tokens :],
            seed=seq.seed,
            lookahead=seq.lookahead,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=list(self.logprobs) if wants_logprobs else None,
            stats=self.stats.as_dict(),
            origins=list(self.origins),
        )


@dataclass(eq=False, slots=True)
class Request:
    """All samples of one prompt while the engine serves them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    added_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def finished(self) -> bool:
        return all(sample.seq.finish_reason for sample in self.samples)

    def output(self) -> RequestOutput:
        """A snapshot; the lists are copies."""
        end = time.perf_counter() if self.finished_at is None else self.finished_at
        first = self.first_token_at
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sample.output(i) for i, sample in enumerate(self.samples)],
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            finished=self.finished,
            error=self.error,
            seconds=end - self.added_at,
            seconds_to_first_token=None if first is None else first - self.added_at,
        )
