"""Measures what forwards of a pair cost on this machine; once, then from the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.batch import ForwardBatch
from specdec.lookahead import StepCosts
from specdec.models.gguf_file import cache_dir
from specdec.models.paged_model import PagedModel
from specdec.sequence import blocks_for

logger = logging.getLogger("specdec")

NUM_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)  # of the measured forwards
CONTEXT = 256  # tokens before them
REPEATS = 3
BUDGET_SECONDS = 2.0  # per model; larger forwards are left out beyond it
DRIFT = 1.5  # cached costs are measured again if one token costs this many times more, or less


def step_costs(
    target: PagedModel, draft: PagedModel | None, about: dict[str, Any], cache: Path | None = None
) -> StepCosts:
    """Costs of this pair, from the cache if one token still costs what it did.

    about: what the costs depend on beside this machine (models, linears, attention); the cache's
    key. The KV of the pool's first blocks is overwritten: call it before serving.
    """
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "model": _cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    key = hashlib.sha256(json.dumps([machine, about], sort_keys=True).encode()).hexdigest()[:24]
    file = (cache or cache_dir()) / "costs" / f"{key}.json"
    known = _read(file)
    if known is not None:
        now, before = measure(target, NUM_TOKENS[:1])[1], known.target[1]
        if before / DRIFT <= now <= before * DRIFT:
            return known
    found = StepCosts(
        measure(target, NUM_TOKENS), {} if draft is None else measure(draft, NUM_TOKENS)
    )
    _write(file, found, machine, about)
    return found


def measure(model: PagedModel, num_tokens: Sequence[int]) -> dict[int, float]:
    """Seconds of forwards of one sequence by number of tokens, best of a few, logits included."""
    found: dict[int, float] = {}
    end = time.perf_counter() + BUDGET_SECONDS
    limit = min(model.max_model_len, model.kv_cache.num_blocks * model.kv_cache.block_size)
    for count in num_tokens:
        if found and (time.perf_counter() > end or count > limit):
            break
        batch = _batch(model, count, min(CONTEXT, max(0, limit - count)))
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            model.forward(batch)
            seconds.append(time.perf_counter() - start)
        found[count] = min(seconds)
    return found


def _batch(model: PagedModel, count: int, context: int) -> ForwardBatch:
    size = model.kv_cache.block_size
    table = torch.arange(blocks_for(context + count, size), dtype=torch.int32)[None]
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(model.vocab_size, (1, count), generator=generator)
    return ForwardBatch.uniform(
        ids,
        torch.tensor([context]),
        torch.tensor([count]),
        table,
        size,
        context + count,
        torch.arange(count),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def _read(file: Path) -> StepCosts | None:
    """Cached costs; None if there are none, or the file is damaged."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        parts = [{int(n): float(s) for n, s in data[name].items()} for name in ("target", "draft")]
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return StepCosts(*parts) if 1 in parts[0] else None


def _write(file: Path, costs: StepCosts, machine: dict[str, Any], about: dict[str, Any]) -> None:
    data = {"target": costs.target, "draft": costs.draft, "machine": machine, "about": about}
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data, indent=2), encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:  # a home that cannot be written to costs a second at each start
        logger.info("measured costs are not kept: %s", error)
