"""What the target is asked: prompts from files, built-in ones, and user turns of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from specdec.config import SamplingParams
from specdec.llm import LLM

MARK = "\u2402"  # stands for the user's text when the template is cut open
MIN_TURN_TOKENS = 6
TURN_TEMPERATURES = (1.0, 0.8)
TEXT_KEYS = ("prompt", "question", "instruction", "text")
TASKS = (
    "Explain {} to a beginner.",
    "Write a short story about {}.",
    "List the main advantages and disadvantages of {}.",
    "Give me a step-by-step guide to {}.",
    "What are common mistakes people make with {}?",
    "Write an email to a colleague about {}.",
    "Summarise what is known about {} in five sentences.",
    "Write a Python function that has to do with {}, with comments.",
    "Compare {} with the closest alternative.",
    "Answer as a teacher: why does {} matter?",
    "Make a table of facts about {}.",
    "Write a dialogue of two people who disagree about {}.",
)
TOPICS = (
    *("photosynthesis", "compound interest", "sorting a list", "baking bread", "black holes"),
    *("the French Revolution", "learning to swim", "vaccines", "train travel", "recycling"),
    *("matrix multiplication", "a healthy breakfast", "job interviews", "volcanoes", "chess"),
    *("renewable energy", "the human heart", "writing a poem", "reading a map", "inflation"),
    *("database indexes", "gardening in a small flat", "the water cycle", "friendship", "bees"),
    *("public speaking", "regular expressions", "the stock market", "moving house", "sleep"),
)


def built_in_prompts() -> list[str]:
    """Short tasks on many topics, for users who bring no prompts."""
    return [task.format(topic) for task, topic in product(TASKS, TOPICS)]


def file_prompts(llm: LLM, files: Sequence[Path]) -> list[list[int]]:
    """Prompts of .jsonl files (token_ids, or a text as "prompt", "question", "instruction", "text"
    or the first of "turns", with an optional "system_prompt") and of text files, one a line.

    Raises ValueError that names file and line.
    """
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error}); convert it") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                entry = _entry(line, f"{file}, line {number}") if file.suffix == ".jsonl" else line
                found.append(encode_prompt(llm, entry))
        if not found:
            raise ValueError(f"{file} holds no prompt")
    return found


def encode_prompt(llm: LLM, entry: str | list[int] | tuple[str, str]) -> list[int]:
    """Token ids, ready for the answer; a text goes through the chat template where there is one."""
    if isinstance(entry, list):
        return entry
    system, text = entry if isinstance(entry, tuple) else ("", entry)
    if not getattr(llm.tokenizer, "chat_template", None):
        return llm.encode(f"{system}\n{text}" if system else text)
    messages = [{"role": "system", "content": system}] if system else []
    return llm.chat_token_ids([*messages, {"role": "user", "content": text}])


def _entry(line: str, where: str) -> str | list[int] | tuple[str, str]:
    try:
        fields = json.loads(line)
        if "token_ids" in fields:
            return [int(token) for token in fields["token_ids"]]
        text = next((fields[key] for key in TEXT_KEYS if fields.get(key)), None)
        text = text or fields["turns"][0]
        system = fields.get("system_prompt") or ""
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{where}: needs a JSON object with token_ids, {', '.join(TEXT_KEYS)} or turns "
            f"({type(error).__name__}: {error})"
        ) from None
    if not isinstance(text, str) or not isinstance(system, str):
        raise ValueError(f"{where}: the prompt is not a text")
    return (system, text) if system else text


def own_turns(llm: LLM, count: int, *, max_tokens: int, seed: int) -> list[list[int]]:
    """Prompts whose user turn the target wrote: it goes on right behind the template's user header.

    Only turns that ended by themselves are kept, each once. Empty without a chat template.
    """
    frame = _frame(llm)
    if frame is None or count == 0:
        return []
    head, tail = frame
    params = [
        SamplingParams(
            temperature=TURN_TEMPERATURES[i % 2], max_tokens=max_tokens, seed=seed * count + i
        )
        for i in range(count)
    ]
    outputs = llm.generate([head] * count, params)
    ended = (o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop")
    turns = {tuple(sample.token_ids[:-1]) for sample in ended}
    return [[*head, *turn, *tail] for turn in sorted(turns) if len(turn) >= MIN_TURN_TOKENS]


def _frame(llm: LLM) -> tuple[list[int], list[int]] | None:
    """Token ids of the chat template before and behind the user's text."""
    tokenizer: Any = llm.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    head, found, tail = text.partition(MARK)
    if not found:
        return None
    ids = (list(tokenizer.encode(part, add_special_tokens=False)) for part in (head, tail))
    return next(ids), next(ids)


def mixed_temperatures(count: int, passes: int) -> Iterator[float]:
    """Temperatures of `count` answers: a prompt's first answers are often greedy, later ones
    (passes > 0) warmer.
    """
    first = (1.0, 0.7, 0.0, 1.0, 0.7, 0.0, 1.0, 0.5, 1.0, 0.7, 0.0, 1.0, 0.7, 0.0, 1.0, 0.5)
    later = (1.0, 0.7, 1.0, 0.5, 1.0, 0.7, 1.0, 0.7)
    cycle = later if passes else first
    return (cycle[i % len(cycle)] for i in range(count))
