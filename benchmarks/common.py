"""What benchmark scripts share: prompts, a result's header, timing, spreads, tables, saving."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    "specdec-paged",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "gguf",
    "flash-attn",
)
SCHEMA_VERSION = 1
Ids = list[int]  # token ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its kind of work."""

    kind: str
    text: str


CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        total = total + item["price"] * item["quantity"]
    total = total + total * tax_rate
    return total
"""
ARTICLE = (
    "The town library of Eastmere reopened on Monday after two years of repairs. A burst "
    "pipe had flooded the ground floor and ruined about nine thousand books. The repairs "
    "cost 2.4 million, of which the town paid half; the rest came from donations and from "
    "an insurance payment. The new ground floor has a raised floor, wider aisles and a "
    "reading room for children. The library will open every day except Sunday, and "
    "membership stays free for anyone who lives in the town."
)
MEETING = (
    "Ana: The release slipped because the import tests failed on Windows. Ben: I fixed "
    "the path handling yesterday, the tests pass now. Ana: Good. Then we can ship on "
    "Thursday. Carla: The release notes still lack the section on import. I will write it "
    "by Wednesday noon. Ben: I will test the upgrade from the last version on Wednesday. "
    "Ana: Then we meet on Thursday at nine and decide."
)

PROMPTS = (  # kinds take turns, so that the first half of the list holds one of each
    Prompt("chat", "What should I see in Lisbon in two days? I like food and old buildings."),
    Prompt(
        "code",
        f"Rewrite this function so that it also takes a discount, applied before tax:\n\n{CODE}",
    ),
    Prompt("summarisation", f"Summarise this text in two sentences:\n\n{ARTICLE}"),
    Prompt(
        "reasoning",
        "A train leaves at 9:40 and needs 85 minutes to the border, where it waits 15 minutes, "
        "and then 50 minutes to the city. When does it arrive? Think step by step.",
    ),
    Prompt("chat", "Explain to a ten-year-old why the sky is blue and the evening sky is red."),
    Prompt(
        "code",
        "Write a Python class Stack with the methods push, pop, peek and is_empty, "
        "and show how it is used.",
    ),
    Prompt("summarisation", f"List who does what until when in this meeting:\n\n{MEETING}"),
    Prompt(
        "reasoning",
        "A shop sells pens at 3 for 2 euros and pads at 4 euros each. Mia buys 12 pens and 3 pads "
        "and pays with 25 euros. How much change does she get? Think step by step.",
    ),
)


def read_prompts(path: Path | None, limit: int) -> list[Prompt]:
    """The built-in prompts, or those of a .jsonl file: {"prompt": text} or {"turns": [text, ...]}.

    Of turns the first is taken. A row's "kind" or "category" is kept. Raises ValueError naming the
    row that has neither.
    """
    if path is None:
        return list(PROMPTS[:limit])
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        turns = row.get("turns")
        text = row.get("prompt") or (turns[0] if turns else None)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path.name} line {number}: needs a 'prompt' or 'turns' with text")
        prompts.append(Prompt(str(row.get("kind") or row.get("category") or "file"), text))
    if not prompts:
        raise ValueError(f"{path.name} has no prompts")
    return prompts[:limit]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of the repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, digits: int = 2) -> str:
        low, high = f"{self.min:.{digits}f}", f"{self.max:.{digits}f}"
        return f"{self.median:.{digits}f} ({low}-{high})"

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Timing:
    """What one timed call took."""

    seconds: float  # wall clock; a GPU's work is waited for
    disturbance: float  # share of all processors that others used meanwhile, 0 to 1


def timed(work: Callable[[], Any]) -> tuple[Timing, Any]:
    """Time `work` and return what it returns."""
    _synchronise()
    busy, start = _others_cpu_seconds(), time.perf_counter()
    result = work()
    _synchronise()
    seconds = time.perf_counter() - start
    others = max(_others_cpu_seconds() - busy, 0.0)
    return Timing(seconds, others / (seconds * (os.cpu_count() or 1))), result


def wait_until_quiet(limit: float, seconds: float) -> bool:
    """Wait, at most `seconds`, until others use at most `limit` of the processors; 1 = don't."""
    if limit >= 1:
        return True
    end = time.monotonic() + seconds
    while timed(lambda: time.sleep(0.5))[0].disturbance > limit:
        if time.monotonic() >= end:
            return False
    return True


def _others_cpu_seconds() -> float:
    """Processor time of everything but this process since the start, stolen time included."""
    all_times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = all_times.idle + getattr(all_times, "iowait", 0.0)
    guest = getattr(all_times, "guest", 0.0) + getattr(all_times, "guest_nice", 0.0)
    return float(sum(all_times) - idle - guest - own.user - own.system)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def header(question: str, command: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """What a reader needs to judge and to repeat a result."""
    return {
        "schema_version": SCHEMA_VERSION,
        "question": question,
        "command": " ".join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "seeds": list(seeds),
        "hardware": {
            "cpu": cpu_model(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **versions()},
    }


def versions() -> dict[str, str]:
    """Installed versions of what can change a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, "+" behind it if files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def header_text(found: dict[str, Any]) -> str:
    """The header as a few lines above a table."""
    hardware, installed = found["hardware"], found["versions"]
    machine = f"{hardware['cpu']}, {hardware['threads']} threads, {hardware['memory_gib']} GiB"
    return "\n".join(
        (
            f"{found['question']}",
            f"  command   {found['command']}",
            f"  machine   {', '.join([machine, *hardware['gpus']])}",
            f"  versions  {', '.join(f'{name} {version}' for name, version in installed.items())}",
            f"  commit    {found['commit']}, {found['date']}, seeds {found['seeds']}",
        )
    )


def save_json(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write a result beside the others and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


@torch.inference_mode()
def transformers_generate(
    model: Any,
    prompts: list[Ids],
    max_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 0.0,
    *,
    lookup: int = 0,
    assistant: Any = None,
    lookahead: int = 0,
) -> list[Ids]:
    """New tokens of transformers' generate, padded on the left, cut behind an end token; with
    prompt lookup of `lookup` tokens, or an assistant model that drafts `lookahead` tokens.
    """
    width = max(len(prompt) for prompt in prompts)
    pad = eos_ids[0] if eos_ids else 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
        max_new_tokens=max_tokens,
        pad_token_id=pad,
        eos_token_id=list(eos_ids) or None,
        prompt_lookup_num_tokens=lookup or None,
    )
    drafting = {}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = lookahead
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        drafting["assistant_model"] = assistant
    found = model.generate(ids, attention_mask=mask, generation_config=config, **drafting)
    rows = found[:, width:].tolist()
    return [cut(row[:max_tokens], eos_ids) for row in rows]


def cut(token_ids: Ids, eos_ids: Sequence[int]) -> Ids:
    """The tokens up to and with the first end token."""
    for at, token in enumerate(token_ids):
        if token in eos_ids:
            return token_ids[: at + 1]
    return token_ids


def equality(reference: list[Ids], runs: Sequence[list[Ids]]) -> dict[str, Any]:
    """In how many prompts all runs gave the reference's tokens; where the others first differ."""
    differences = []
    for number, expected in enumerate(reference):
        for run in runs:
            got = run[number]
            if got != expected:
                pairs = zip(got, expected, strict=False)
                same = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected))
                )
                differences.append({"prompt": number, "first_difference": same})
                break
    return {
        "num_equal": len(reference) - len(differences),
        "num_prompts": len(reference),
        "differences": differences,
    }


def encode(llm: Any, text: str) -> Ids:
    """A prompt as a chat turn, or raw where the model has no chat template."""
    if getattr(llm.tokenizer, "chat_template", None):
        return llm.chat_token_ids([{"role": "user", "content": text}])
    return llm.encode(text)


def say(text: str) -> None:
    """Progress, beside the table on stdout."""
    print(text, file=sys.stderr, flush=True)
