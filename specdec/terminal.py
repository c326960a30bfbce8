"""What the command line prints: streamed and marked text, figures, facts about this machine."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.assembly import ACCEPTANCE_RULES, PROPOSERS
from specdec.attention.select import BACKENDS, select_backend
from specdec.config import SamplingParams
from specdec.llm import LLM
from specdec.models.linear import choose_kind
from specdec.outputs import RequestOutput, TextStream

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}
PLAIN_MARKS = {"accepted": "+", "recovered": "!", "bonus": "*", "plain": ""}
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "gguf", "flash-attn", "triton")


def print_stream(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """Print the text as it grows."""
    shown = 0
    for output in llm.stream(prompt, params):
        sys.stdout.write(output.text[shown:])
        sys.stdout.flush()
        shown = max(shown, len(output.text))
    print()
    return output


def print_marked(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """Print the text with each token's origin: in colour on a terminal, else with a sign behind
    each token.
    """
    console = Console(highlight=False, soft_wrap=True)
    stream = TextStream(llm.tokenizer, prompt[-8:], skip_special_tokens=params.skip_special_tokens)
    pending: deque[tuple[int, str]] = deque()  # where a token's text ends, and its origin
    done = shown = 0

    def show(text: str, end: int, origin: str, mark: str) -> None:
        piece = text[shown:end] + ("" if console.is_terminal else mark)
        console.print(Text(piece, style=STYLES[origin]), end="")

    for output in llm.stream(prompt, params):
        sample = output.outputs[0]
        for token, origin in zip(sample.token_ids[done:], sample.origins[done:], strict=True):
            stream.push(token)
            pending.append((len(stream.text), origin))
        done = len(sample.token_ids)
        while pending and (pending[0][0] <= len(output.text) or output.finished):
            end, origin = pending.popleft()  # a stop string cuts the text before a token's end
            show(output.text, end, origin, PLAIN_MARKS[origin])
            shown = max(shown, min(end, len(output.text)))
    show(output.text, len(output.text), "plain", "")  # half a character at the very end
    console.print()
    names = ("accepted", "recovered", "bonus")
    if console.is_terminal:
        legend = Text("  ").join(Text(name, style=STYLES[name]) for name in names)
    else:
        legend = Text("  ".join(f"{PLAIN_MARKS[name]} {name}" for name in names))
    Console(stderr=True).print(legend)
    return output


def print_stats(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """Acceptance figures and speed, on stderr so that the text can be piped."""
    stats = llm.stats()
    about = llm.description
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    drafts = about["draft"] or about["proposer"]
    table.add_row("target", f"{about['target']} ({about['dtype']}, {about['device']})")
    table.add_row("linears", about["linears"])
    table.add_row("drafts", f"{drafts}, up to {about['num_draft_tokens']} a step")
    if about["lookahead"] != "given":
        table.add_row("lookahead", about["lookahead"])
    table.add_row("attention", f"{about['attention']} ({about['attention_reason']})")
    table.add_row(
        "emitted",
        f"{stats['num_emitted_tokens']} tokens in {stats['num_target_steps']} target steps",
    )
    accepted = f"{stats['num_accepted_tokens']} of {stats['num_draft_tokens']}"
    table.add_row("accepted", f"{accepted} drafts, acceptance rate {stats['acceptance_rate']:.3f}")
    by_position = " ".join(f"{rate:.2f}" for rate in stats["acceptance_by_position"])
    if by_position:
        table.add_row("by position", by_position)
    table.add_row(
        "mean accepted length", f"{stats['mean_accepted_length']:.2f} tokens a target step"
    )
    seconds = sum(stats["seconds"].values())
    if seconds:
        rate = stats["num_emitted_tokens"] / seconds
        phases = ", ".join(f"{name} {value:.2f}" for name, value in stats["seconds"].items())
        table.add_row("time", f"{seconds:.2f} s in the engine, {rate:.1f} tokens/s ({phases})")
    first = [o.seconds_to_first_token for o in outputs if o.seconds_to_first_token is not None]
    if first:
        table.add_row("first token", f"{min(first):.2f} s")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print()
    console.print(table)


def collect_info() -> dict[str, Any]:
    """Versions, devices, backends and what auto would choose on this machine."""
    versions = {"python": platform.python_version()}
    for name in ("specdec-paged", *PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    devices = [{"name": "cpu", "description": platform.processor() or platform.machine()}]
    for i in range(torch.cuda.device_count()):
        devices.append({"name": f"cuda:{i}", "description": torch.cuda.get_device_name(i)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = select_backend("auto", device, [(dtype, 64)])
    linears = {} if device.type == "cuda" else {"cpu_linear": _linears()}
    return {
        "versions": versions,
        "devices": devices,
        "threads": torch.get_num_threads(),
        "attention_backends": {
            name: _backend_state(name, device, dtype) for name in BACKENDS.names()
        },
        "proposers": PROPOSERS.names(),
        "acceptance_rules": ACCEPTANCE_RULES.names(),
        "auto": {
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "attention": choice.backend.name,
            "reason": choice.reason,
            **linears,
        },
    }


def _linears() -> str:
    """The kind of CPU linear that auto takes, timed on products of the default target's size."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3072, 576, generator=generator) for _ in range(6)]
    kind, seconds = choose_kind(weights, (1, 4))
    times = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in seconds.items())
    return f"{kind} (of {times})"


def print_info(found: dict[str, Any]) -> None:
    """collect_info() as text."""
    for title, values in found.items():
        print(f"{title.replace('_', ' ')}:")
        if isinstance(values, dict):
            for name, value in values.items():
                print(f"  {name}: {value}")
        elif isinstance(values, list):
            for value in values:
                text = (
                    f"{value['name']}: {value['description']}" if isinstance(value, dict) else value
                )
                print(f"  {text}")
        else:
            print(f"  {values}")


def _backend_state(name: str, device: torch.device, dtype: torch.dtype) -> str:
    try:
        reason = BACKENDS.get(name)().supports(device, dtype, 64)
    except ImportError as error:
        return f"not available: {error}"
    return f"not usable here: {reason}" if reason else "available"
