"""Corpus: conversations of the target on disk, in shards, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specdec.config import SamplingParams
from specdec.distill.config import DistillConfig
from specdec.distill.prompts import mixed_temperatures
from specdec.llm import LLM

SHARD_ROUNDS = 8  # a shard has this many prompts per running sequence


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the target's answer."""

    token_ids: tuple[int, ...]
    num_prompt: int

    @property
    def num_answer(self) -> int:
        return len(self.token_ids) - self.num_prompt


def write_answers(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    seed: int,
) -> list[Conversation]:
    """The target's answers, one a prompt; failed and empty ones are left out."""
    params = [
        SamplingParams(temperature=t, max_tokens=max_tokens, seed=(seed << 32) + i)
        for i, t in enumerate(temperatures)
    ]
    conversations = []
    for prompt, output in zip(prompts, llm.generate(list(prompts), params), strict=True):
        answer = output.outputs[0].token_ids
        if answer and not output.error:
            conversations.append(Conversation((*prompt, *answer), len(prompt)))
    return conversations


def write_corpus(
    llm: LLM, prompts: Sequence[Sequence[int]], folder: Path, config: DistillConfig
) -> list[Conversation]:
    """Shards of answers until num_answer_tokens are there; a shard that exists is only read.

    Prompts come in an order drawn from the seed, again and again with other seeds and warmer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    usable = [p for p in prompts if len(p) < config.max_conversation_tokens]
    if not usable:
        raise ValueError(
            f"no prompt is shorter than max_conversation_tokens {config.max_conversation_tokens}; "
            f"raise it, or give other prompts"
        )
    size = min(len(usable), SHARD_ROUNDS * config.max_num_seqs)
    found: list[Conversation] = []
    shard = 0
    while sum(c.num_answer for c in found) < config.num_answer_tokens:
        file = folder / f"shard-{shard:05d}.safetensors"
        if not file.is_file():
            chosen, temperatures = _draw(usable, shard, size, config.seed)
            save_shard(
                file,
                write_answers(
                    llm,
                    chosen,
                    temperatures,
                    max_tokens=config.max_answer_tokens,
                    seed=config.seed * 100_003 + shard + 1,
                ),
            )
        new = [c for c in load_shard(file) if len(c.token_ids) <= config.max_conversation_tokens]
        if not new:
            raise ValueError("the target answered nothing: every answer was empty or failed")
        found += new
        shard += 1
    return found


def _draw(
    prompts: Sequence[Sequence[int]], shard: int, size: int, seed: int
) -> tuple[list[Sequence[int]], list[float]]:
    """The prompts of a shard, the i-th slice of the passes over all of them, and temperatures."""
    chosen: list[Sequence[int]] = []
    temperatures: list[float] = []
    first, last = shard * size, (shard + 1) * size
    while first < last:
        passes, offset = divmod(first, len(prompts))
        order = np.random.default_rng((seed, passes)).permutation(len(prompts))
        part = order[offset : offset + last - first]
        chosen += [prompts[i] for i in part]
        temperatures += mixed_temperatures(len(part), passes)
        first += len(part)
    return chosen, temperatures


def save_shard(file: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations, whole or not at all."""
    lengths = torch.tensor([len(c.token_ids) for c in conversations], dtype=torch.int32)
    tokens = [token for c in conversations for token in c.token_ids]
    temporary = file.with_suffix(".part")
    save_file(
        {
            "token_ids": torch.tensor(tokens, dtype=torch.int32),
            "lengths": lengths,
            "num_prompt": torch.tensor([c.num_prompt for c in conversations], dtype=torch.int32),
        },
        temporary,
    )
    os.replace(temporary, file)


def load_shard(file: Path) -> list[Conversation]:
    tensors = load_file(file)
    pieces = torch.split(tensors["token_ids"], tensors["lengths"].tolist())
    return [
        Conversation(tuple(piece.tolist()), num_prompt)
        for piece, num_prompt in zip(pieces, tensors["num_prompt"].tolist(), strict=True)
    ]


def frequent_ids(
    conversations: Sequence[Conversation], vocab_size: int, count: int
) -> torch.Tensor:
    """The `count` ids most frequent in the answers, ascending, [count] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for conversation in conversations:
        np.add.at(counts, list(conversation.token_ids[conversation.num_prompt :]), 1)
    best = np.argsort(-counts, kind="stable")[:count]
    return torch.from_numpy(np.sort(best))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Conversations laid side by side in rows. -1 in `segments` is padding."""

    token_ids: torch.Tensor  # [num_rows, row_tokens] int32
    segments: torch.Tensor  # [num_rows, row_tokens] int16: which conversation of its row
    positions: torch.Tensor  # [num_rows, row_tokens] int32, from 0 in each conversation
    learned: torch.Tensor  # [num_rows, row_tokens] bool: predicts a token of an answer

    @property
    def num_rows(self) -> int:
        return int(self.token_ids.shape[0])


def pack_rows(conversations: Sequence[Conversation], row_tokens: int) -> PackedRows:
    """Best fit: the longest conversations first, each into the fullest row that has room."""
    order = sorted(range(len(conversations)), key=lambda i: -len(conversations[i].token_ids))
    by_room: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # rows by tokens left
    rows: list[list[int]] = []
    for i in order:
        length = len(conversations[i].token_ids)
        room = next((r for r in range(length, row_tokens) if by_room[r]), row_tokens)
        if room == row_tokens:
            rows.append([])
            row = len(rows) - 1
        else:
            row = by_room[room].pop()
        rows[row].append(i)
        by_room[room - length].append(row)
    shape = (len(rows), row_tokens)
    token_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments, learned = np.full(shape, -1, np.int16), np.zeros(shape, bool)
    for row, members in enumerate(rows):
        start = 0
        for segment, i in enumerate(members):
            own = conversations[i]
            end = start + len(own.token_ids)
            token_ids[row, start:end] = own.token_ids
            positions[row, start:end] = np.arange(end - start)
            segments[row, start:end] = segment
            learned[row, start + own.num_prompt - 1 : end - 1] = True
            start = end
    return PackedRows(*(torch.from_numpy(a) for a in (token_ids, segments, positions, learned)))


def save_prompts(file: Path, prompts: Sequence[Sequence[int]]) -> None:
    temporary = file.with_suffix(".part")
    with temporary.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            stream.write(json.dumps({"token_ids": list(prompt)}) + "\n")
    os.replace(temporary, file)
