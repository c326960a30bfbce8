"""specdec: lossless speculative decoding on paged attention."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.config import EngineConfig, SamplingParams
    from specdec.llm import LLM
    from specdec.outputs import CompletionOutput, RequestOutput, TokenLogprobs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
]
_HOME = {
    "LLM": "specdec.llm",
    "CompletionOutput": "specdec.outputs",
    "EngineConfig": "specdec.config",
    "RequestOutput": "specdec.outputs",
    "SamplingParams": "specdec.config",
    "TokenLogprobs": "specdec.outputs",
}


def __getattr__(name: str) -> object:
    """Import a public name at first use: `specdec --help` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
