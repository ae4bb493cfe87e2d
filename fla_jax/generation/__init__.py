"""Text generation: prompts read in large pieces, a compiled decoding loop, sampling, tokenizers."""

from .chat import ChatTemplate, JinjaTemplate, Turn, WorldTemplate, chat_template
from .convenience import generate, stream
from .decoder import Decoder
from .generator import Generator
from .prompts import prefill
from .requests import Completion, Event, Logprobs, Request, Usage
from .rows import GenerationState
from .sampling import TokenCounts, sample
from .sampling_params import SamplingArrays, SamplingParams, sampling_arrays
from .state_cache import Prefix
from .streaming import Stream
from .text import decode_stream
from .tokenizer import Tokenizer, checkpoint_tokenizer, load_tokenizer, uncounted

__all__ = [
    "ChatTemplate",
    "Completion",
    "Decoder",
    "Event",
    "GenerationState",
    "Generator",
    "JinjaTemplate",
    "Logprobs",
    "Prefix",
    "Request",
    "SamplingArrays",
    "SamplingParams",
    "Stream",
    "TokenCounts",
    "Tokenizer",
    "Turn",
    "Usage",
    "WorldTemplate",
    "chat_template",
    "checkpoint_tokenizer",
    "decode_stream",
    "generate",
    "load_tokenizer",
    "prefill",
    "sample",
    "sampling_arrays",
    "stream",
    "uncounted",
]
