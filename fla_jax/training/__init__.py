"""Training: the official recipe, losses, long contexts, state tuning."""

from .long_context import chunked_loss, truncated_value_and_grad
from .losses import chunked_cross_entropy, cross_entropy
from .next_token import next_token_loss, packed_loss
from .recipe import matrix_mask, muon_dimension_numbers, parameter_groups, rwkv_optimizer, rwkv_schedule
from .state_tuning import initial_state, load_states, save_states, state_loss, tune_states, zero_states

__all__ = [
    "chunked_cross_entropy",
    "chunked_loss",
    "cross_entropy",
    "initial_state",
    "load_states",
    "matrix_mask",
    "muon_dimension_numbers",
    "next_token_loss",
    "packed_loss",
    "parameter_groups",
    "rwkv_optimizer",
    "rwkv_schedule",
    "save_states",
    "state_loss",
    "truncated_value_and_grad",
    "tune_states",
    "zero_states",
]
