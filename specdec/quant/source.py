"""Where a checkpoint's settings and files come from: a folder, or a hub repository's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers.utils import cached_file

from specdec.quant.config import FILE, QuantConfig, quantization_fields, read_quant_config

PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # never pickled files


def take_settings(
    config: Any, found: str, name: str, revision: str | None, *, fetch: bool
) -> QuantConfig | None:
    """The settings of packed weights, taken out of transformers' `config`; None for plain weights.

    Args:
        found: local folder, or hub id.
        name: what the user wrote, for errors.
        fetch: look for quantize_config.json in the hub repository too.

    Raises ValueError for a format that is not read.
    """
    folder = Path(found)
    if fetch and not folder.exists():
        file = cached_file(
            found,
            FILE,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        folder = folder if file is None else Path(file).parent
    fields = quantization_fields(config, folder)
    if fields is None:
        return None
    quant = read_quant_config(fields, name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers' own quantisers are not entered
    return quant


def fetch_checkpoint(name: str, revision: str | None) -> str:
    """The folder of a hub repository's safetensors and small files, in the hub's cache.

    Raises ValueError with the remedy if they cannot be fetched.
    """
    try:
        return str(snapshot_download(name, revision=revision, allow_patterns=list(PATTERNS)))
    except Exception as error:  # network, rights, disk
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"the weights of {name} cannot be fetched ({lines[0]}); give a local folder"
        ) from error
