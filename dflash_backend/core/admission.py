"""Which configs can work at all, and which requests the engine can take.

Every refusal is a sentence with the numbers and what to change: the config is the operator's, requests the client's.
"""

from __future__ import annotations

from dflash_backend.config import ConfigError
from dflash_backend.core.request import Request, peak_positions
from dflash_backend.core.scheduler_config import SchedulerConfig, blocks_for
from dflash_backend.core.tenants import FairQueue
from dflash_backend.messages import TENANTS_IN_QUEUE, ErrorStatus, GenerationRequest


class RequestError(Exception):
    """The engine does not take a request, or gave it up. `status` is a gRPC status name; the message is for the
    client."""

    def __init__(self, status: ErrorStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def check_config(config: SchedulerConfig) -> None:
    """Raise `ConfigError` when no request could make progress within these config."""
    k = config.num_speculative_tokens
    if config.num_blocks < 1:
        raise ConfigError("the KV cache has no block; raise kv_cache_gb or gpu_memory_utilization")
    group = config.window_group
    longest = blocks_for(config.max_model_len, config.block_size)
    if group is not None and group.num_blocks < (most := min(group.most_blocks, longest)):
        raise ConfigError(
            f"layers with a window of {group.window} positions have {group.num_blocks} KV blocks, and a request holds "
            f"up to {most} of them: raise kv_cache_gb, or lower max_num_batched_tokens"
        )
    if config.max_num_batched_tokens < 1 + k:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens} and num_speculative_tokens is {k}: a decode "
            f"row runs its last token and all its drafts in one step, so raise max_num_batched_tokens to at least "
            f"{1 + k} or lower num_speculative_tokens to at most {config.max_num_batched_tokens - 1}"
        )
    if k > 0 and config.drafter_max_len < 1:
        raise ConfigError(
            f"num_speculative_tokens is {k} and the drafter's maximum length is {config.drafter_max_len}, so it could "
            f"never draft; set num_speculative_tokens to 0 or use a drafter with a maximum length"
        )


def check_prompt(request: GenerationRequest, config: SchedulerConfig) -> None:
    """Raise RequestError(INVALID_ARGUMENT) when the request breaks a bound that its own numbers show."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise RequestError("INVALID_ARGUMENT", "the prompt is empty; at least one token is needed")
    if num_prompt_tokens + 1 > config.max_model_len:
        raise RequestError(
            "INVALID_ARGUMENT",
            f"the prompt has {num_prompt_tokens} tokens, which with one token of output is more than max_model_len "
            f"({config.max_model_len}); shorten it to at most {config.max_model_len - 1} tokens",
        )
    k = request.sampling.num_speculative_tokens
    if k is not None and not 0 <= k <= config.num_speculative_tokens:
        raise RequestError(
            "INVALID_ARGUMENT",
            f"num_speculative_tokens is {k}; this server allows 0 to {config.num_speculative_tokens}",
        )
    if request.sampling.n != 1:
        raise RequestError(
            "INVALID_ARGUMENT",
            f"n is {request.sampling.n}; the engine makes one completion of a request, so send it once for each",
        )


def check_fits_alone(request: Request, config: SchedulerConfig) -> None:
    """Raise RequestError(INVALID_ARGUMENT) when the whole KV pool is too small for the request at its longest."""
    needed = blocks_for(peak_positions(request, config), config.block_size)
    if needed > config.num_blocks:
        raise RequestError(
            "INVALID_ARGUMENT",
            f"the request needs up to {needed} KV blocks of {config.block_size} tokens (prompt of "
            f"{request.num_prompt_tokens} tokens, max_tokens {request.sampling.max_tokens}, num_speculative_tokens "
            f"{request.num_speculative_tokens}) and the server has {config.num_blocks} in all; send a shorter prompt, "
            f"lower max_tokens, or have the server's kv_cache_gb raised",
        )


def check_queue(request: Request, queue: FairQueue, num_running: int, config: SchedulerConfig) -> None:
    """Raise RequestError(UNAVAILABLE) when the queue has no place for the request. Those that free rows wait for do not
    count; those that wait for a grammar or for KV do.

    A tenant may have `max_queue_size` requests and `max_queue_tokens` tokens waiting, and never more than there are
    places left for all others, `TENANTS_IN_QUEUE` times as many in all: so some are left however much one tenant sends
    (dynamic thresholds: Choudhury and Hahne 1998).
    """
    num_free = max(0, config.max_num_seqs - num_running)
    num_all = len(queue.waiting) + queue.num_aside
    num_others = num_all - num_free
    if num_others < 0:
        return
    num_waiting, num_tokens = queue.num_waiting_of(request.sampling.tenant)
    whose = f" of tenant '{request.sampling.tenant}'" if request.sampling.tenant else ""
    left = TENANTS_IN_QUEUE * config.max_queue_size - num_others
    if max(0, num_waiting - num_free) >= min(config.max_queue_size, left):
        all_tenants = "" if left >= config.max_queue_size else f" ({num_all} of all tenants)"
        raise RequestError(
            "UNAVAILABLE",
            f"{num_waiting} requests{whose} wait already{all_tenants} and max_queue_size is {config.max_queue_size}; "
            "try again later",
        )
    all_tokens = queue.num_waiting_tokens + queue.num_aside_tokens
    tokens_left = TENANTS_IN_QUEUE * config.max_queue_tokens - all_tokens
    most = min(config.max_queue_tokens, tokens_left) if num_waiting else tokens_left
    if num_tokens + request.num_tokens > most:
        raise RequestError(
            "UNAVAILABLE",
            f"requests{whose} with {num_tokens} tokens wait already ({all_tokens} of all tenants), this "
            f"one has {request.num_tokens}, and max_queue_tokens is {config.max_queue_tokens}; try again later",
        )
