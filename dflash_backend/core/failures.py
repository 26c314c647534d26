"""What clients are told when a step with their request does not run."""

from __future__ import annotations


def out_of_memory(message: str) -> str:
    """Of a request that does not fit the device's memory even alone."""
    return (
        f"a step of this request alone does not fit the device's memory ({message}); send a shorter prompt, or "
        "have the server's gpu_memory_utilization or max_num_batched_tokens lowered"
    )


def failed(message: str) -> str:
    """Of a request that fails alone, or whose steps fail again and again."""
    return f"a step with this request failed ({message}); the server's log has the whole error"
