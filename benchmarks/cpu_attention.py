"""What share of a CPU forward is attention? One row of the target, cache append included.

    python benchmarks/cpu_attention.py

Each case is one forward of the target as the engine runs it: a prompt's prefill, a decode step and
a verification, at `--context` tokens. The time inside the attention backend is summed over the
layers of the same forward, so that the share comes from one measurement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Spread, header, header_text, save_json, say, table, timed

from specdec.assembly import assemble
from specdec.attention.base import AttentionBackend
from specdec.batch import ForwardBatch
from specdec.config import EngineConfig
from specdec.models.paged_model import PagedModel

QUESTION = "Attention's share of a forward on a CPU"


class Stopwatch:
    """Wraps a backend's attend and sums the seconds spent in it."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.seconds = 0.0
        self._attend = backend.attend
        backend.attend = self._timed  # type: ignore[method-assign]

    def _timed(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        out = self._attend(*args)
        self.seconds += time.perf_counter() - start
        return out


def one_row(model: PagedModel, num_new: int, num_before: int) -> ForwardBatch:
    """Append num_new tokens behind num_before; logits of the last one, of all in a window."""
    cache = model.kv_cache
    num_blocks = -(-(num_new + num_before) // cache.block_size)
    wanted = torch.arange(num_new) if num_before else torch.tensor([num_new - 1])
    return ForwardBatch.uniform(
        torch.arange(5, 5 + num_new)[None],
        torch.tensor([num_before]),
        torch.tensor([num_new]),
        torch.arange(num_blocks, dtype=torch.int32)[None],
        cache.block_size,
        num_before + num_new,
        wanted,
    )


def measure(
    model: PagedModel, watch: Stopwatch, num_new: int, num_before: int, repeats: int
) -> dict[str, Any]:
    """Forwards of one shape, the first two not counted."""
    seconds, shares, disturbance = [], [], 0.0
    for repeat in range(repeats + 2):
        batch = one_row(model, num_new, num_before)
        watch.seconds = 0.0
        timing, _ = timed(partial(model.forward, batch))
        if repeat >= 2:
            seconds.append(timing.seconds)
            shares.append(watch.seconds / timing.seconds)
            disturbance = max(disturbance, timing.disturbance)
    return {
        "forward_seconds": Spread.of(seconds).as_dict(),
        "attention_share": Spread.of(shares).as_dict(),
        "disturbance": round(disturbance, 3),
    }


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The whole benchmark, as the data that is saved."""
    result: dict[str, Any] = {"header": header(QUESTION, command, seeds=[])}
    config = EngineConfig(device="cpu", attention="reference")
    assembled = assemble(args.target, None, config, progress=False)
    model = assembled.engine.target
    watch = Stopwatch(assembled.attention.backend)
    cases = {
        f"prefill of {args.context}": (args.context, 0),
        f"decode at {args.context}": (1, args.context),
        f"verify 4 at {args.context}": (4, args.context),
    }
    result["settings"] = {"target": args.target, "engine": assembled.description}
    result["results"] = [
        {"case": name, **measure(model, watch, *shape, args.repeats)}
        for name, shape in cases.items()
    ]
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--target", default="smollm2-135m", help="alias or folder")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = parse(given)
    result = run(args, ["python", "benchmarks/cpu_attention.py", *given])
    path = save_json(args.out, "cpu_attention", result)
    print(header_text(result["header"]))
    print()
    rows = [
        (
            one["case"],
            Spread(**{k: v * 1e3 for k, v in one["forward_seconds"].items()}).text(1),
            Spread(**one["attention_share"]).text(3),
        )
        for one in result["results"]
    ]
    print(table(("case", "forward, ms", "attention's share"), rows))
    say(f"\nsaved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
