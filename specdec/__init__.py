"""specdec: lossless speculative decoding on paged attention."""

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
