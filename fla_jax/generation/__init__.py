"""Text generation: prompts read in large pieces, a compiled decoding loop, sampling, tokenizers."""

from .decoder import Decoder
from .decoding import Generation, generate, stream
from .engine import Engine, Finished
from .prompts import prefill
from .sampling import TokenCounts, sample
from .sampling_params import SamplingArrays, SamplingParams, sampling_arrays
from .tokenizer import Tokenizer, decode_stream, load_tokenizer, uncounted

__all__ = [
    "Decoder",
    "Engine",
    "Finished",
    "Generation",
    "SamplingArrays",
    "SamplingParams",
    "TokenCounts",
    "Tokenizer",
    "decode_stream",
    "generate",
    "load_tokenizer",
    "prefill",
    "sample",
    "sampling_arrays",
    "stream",
    "uncounted",
]
