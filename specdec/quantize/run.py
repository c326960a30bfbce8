"""quantize(): a model in, a GPTQ checkpoint and its perplexity before and after out."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.loading import load_model, load_tokenizer, resolve_dtype, resolve_source
from specdec.models.paged_model import ATTENTION_NAME
from specdec.quant.config import BITS
from specdec.quantize.gptq import DAMPING, Codes, Grid
from specdec.quantize.layers import calibrate_layers, layer_linears, perplexity, round_layers
from specdec.quantize.writing import packed_tensors, write_checkpoint

METHODS = ("gptq", "rtn")
HELD_OUT = 0.1  # of the calibration text, for the perplexity, if no other text is given
MIN_TOKENS = 16  # of a row


def quantize(
    model_name: str,
    out: Path,
    grid: Grid,
    *,
    method: str = "gptq",
    calibration: Path | None = None,
    evaluation: Path | None = None,
    num_samples: int = 128,
    sample_tokens: int = 512,
    damping: float = DAMPING,
    device: str = "auto",
    progress: bool = True,
) -> dict[str, Any]:
    """Write a GPTQ checkpoint of the linear layers in the decoder layers to `out`, a new folder;
    embedding, norms and head stay float16. Returns the report.

    Args:
        method: "gptq" needs calibration text; "rtn" rounds each weight to the nearest.
        calibration: UTF-8 text like what the model will see.
        evaluation: text for the perplexity; None: the last tenth of the calibration text.
        num_samples, sample_tokens: rows of the calibration, and tokens in each.

    Raises ValueError with the remedy; `out` exists only when it is complete.
    """
    started = time.perf_counter()
    _check(out, grid, method, calibration)
    model, tokenizer = _load(model_name, device, progress)
    rows, held_out = _texts(tokenizer, calibration, evaluation, num_samples, sample_tokens)
    before = perplexity(model, held_out) if held_out else None
    if method == "gptq":
        steps = calibrate_layers(model, rows, grid, damping)
    else:
        steps = round_layers(model, grid)
    packed = {name: packed_tensors(c, grid.bits) for name, c in _shown(steps, model, progress)}
    after = perplexity(model, held_out) if held_out else None
    _write(out, model, packed, grid, damping, tokenizer)
    return {
        "model": model_name,
        "out": str(out),
        "method": method,
        **asdict(grid),
        "num_modules": len(packed),
        "weight_bytes": sum(file.stat().st_size for file in out.glob("*.safetensors")),
        "calibration_tokens": sum(len(row) for row in rows) if method == "gptq" else 0,
        "evaluation_tokens": sum(len(row) for row in held_out),
        "perplexity_before": before,
        "perplexity_after": after,
        "seconds": time.perf_counter() - started,
    }


def _load(name: str, device: str, progress: bool) -> tuple[PreTrainedModel, Any]:
    """The model with plain masks, float32 on the CPU, and its tokenizer."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(automatic if device == "auto" else device)
    source = resolve_source(name, progress=progress)
    if source.quant is not None:
        raise ValueError(f"{name} is quantised already; give the model it was made from")
    dtype = resolve_dtype("auto", source.config, place)
    model = load_model(source, device=place, dtype=dtype, progress=progress)
    assert model.config._attn_implementation == ATTENTION_NAME  # registered by its import
    model.set_attn_implementation("eager")  # softcaps too, where a family has them
    layer_linears(model)  # refused before any work is done
    return model, load_tokenizer(source)


def _check(out: Path, grid: Grid, method: str, calibration: Path | None) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be {' or '.join(METHODS)}, got {method!r}")
    if grid.bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {grid.bits}")
    if grid.group_size != -1 and (grid.group_size < 32 or grid.group_size % 32):
        raise ValueError(
            f"group_size must be -1 or a multiple of 32, such as 128, got {grid.group_size}"
        )
    if method == "gptq" and calibration is None:
        raise ValueError(
            "method 'gptq' needs calibration text: give --calibration FILE with text like what the "
            "model will see, or --method rtn"
        )
    if grid.act_order and method == "rtn":
        raise ValueError("act-order follows the calibration inputs; leave it out with method 'rtn'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; give a new folder")


def _shown(
    steps: Iterator[tuple[str, Codes]], model: PreTrainedModel, progress: bool
) -> Iterator[tuple[str, Codes]]:
    yield from track(
        steps,
        "quantising",
        total=len(layer_linears(model)),
        console=Console(stderr=True),
        transient=True,
        disable=not progress,
    )


def _texts(
    tokenizer: Any,
    calibration: Path | None,
    evaluation: Path | None,
    num_samples: int,
    sample_tokens: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows for the calibration, all of one length, and for the perplexity."""
    if sample_tokens < MIN_TOKENS or num_samples < 1:
        raise ValueError(
            f"rows of {MIN_TOKENS} tokens or more are needed, and one or more of them; got "
            f"{num_samples} of {sample_tokens}"
        )
    rows: list[Tensor] = []
    held_out: list[Tensor] = []
    if calibration is not None:
        ids = _tokens(tokenizer, calibration)
        kept = len(ids)
        if evaluation is None:
            kept -= max(MIN_TOKENS, int(HELD_OUT * len(ids)))
            held_out = _rows(ids[kept:], sample_tokens, num_samples)
        length = min(sample_tokens, kept)
        rows = [row for row in _rows(ids[:kept], length, num_samples) if len(row) == length]
    if evaluation is not None:
        held_out = _rows(_tokens(tokenizer, evaluation), sample_tokens, num_samples)
    return rows, held_out


def _tokens(tokenizer: Any, file: Path) -> Tensor:
    if tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, so text cannot be used; add one to its folder"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}); convert it") from None
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if len(ids) < 2 * MIN_TOKENS:
        raise ValueError(
            f"{file} gives {len(ids)} tokens, {2 * MIN_TOKENS} are needed, thousands are better"
        )
    return ids


def _rows(ids: Tensor, length: int, limit: int) -> list[Tensor]:
    """At most `limit` rows, spread over the text; the last of the text may be shorter."""
    rows = [row for row in ids.split(length) if len(row) >= MIN_TOKENS]
    if len(rows) <= limit:
        return rows
    chosen = torch.linspace(0, len(rows) - 1, limit).round().long().tolist()
    return [rows[i] for i in chosen]


def _write(
    out: Path,
    model: PreTrainedModel,
    packed: dict[str, dict[str, Tensor]],
    grid: Grid,
    damping: float,
    tokenizer: Any,
) -> None:
    """Into a folder beside it, which then takes its name."""
    temporary = out.with_name(out.name + f".part{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        write_checkpoint(temporary, model, packed, grid, damping)
        model.generation_config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if out.is_dir():
            out.rmdir()  # it is empty
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
