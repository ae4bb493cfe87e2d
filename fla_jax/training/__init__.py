"""Training: the official recipe, losses, long contexts, state tuning, and the parts of a training program."""

from .carry import carried_loss, zero_carry
from .checkpointing import TrainingCheckpoints, last_checkpoint
from .folder_lock import lock_folder
from .logprobs import token_logprobs
from .long_context import chunked_loss, truncated_value_and_grad
from .lora import init_lora, lora_loss, merge_lora
from .lora_files import load_lora, save_lora
from .losses import chunked_cross_entropy, cross_entropy
from .memory import (
    available_memory,
    choose_remat,
    compiled_memory,
    count_parameters,
    estimate_memory,
    peak_memory,
)
from .metrics import MetricWriter, Throughput
from .next_token import next_token_loss, packed_loss
from .recipe import (
    matrix_mask,
    muon_dimension_numbers,
    parameter_groups,
    rwkv_optimizer,
    rwkv_schedule,
    wsd_schedule,
)
from .run_folder import RunFolder, run_description
from .state_tuning import initial_state, load_states, save_states, state_loss, tune_states, zero_states
from .step_metrics import StepMetrics

__all__ = [
    "MetricWriter",
    "RunFolder",
    "StepMetrics",
    "Throughput",
    "TrainingCheckpoints",
    "available_memory",
    "carried_loss",
    "choose_remat",
    "chunked_cross_entropy",
    "chunked_loss",
    "compiled_memory",
    "count_parameters",
    "cross_entropy",
    "estimate_memory",
    "init_lora",
    "initial_state",
    "last_checkpoint",
    "load_lora",
    "load_states",
    "lock_folder",
    "lora_loss",
    "matrix_mask",
    "merge_lora",
    "muon_dimension_numbers",
    "next_token_loss",
    "packed_loss",
    "parameter_groups",
    "peak_memory",
    "run_description",
    "rwkv_optimizer",
    "rwkv_schedule",
    "save_lora",
    "save_states",
    "state_loss",
    "token_logprobs",
    "truncated_value_and_grad",
    "tune_states",
    "wsd_schedule",
    "zero_carry",
    "zero_states",
]
