"""What the engine is compared with on the same weights: `transformers`, and the plain torch loop of `plain.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.engine import Cell
from benchmarks.gpu.plain import PlainPair
from benchmarks.gpu.results import PLAIN, PLAIN_DFLASH, TRANSFORMERS, Cycle
from benchmarks.gpu.shapes import Shape, draft_tensors, target_tensors
from benchmarks.gpu.synthetic import SyntheticAcceptance
from benchmarks.gpu.timing import synchronize
from dflash_backend.checkpoints.spec import RopeSpec

WARM_UP = 3
# New tokens of the two calls of `generate` whose difference is the time of decoding.
FEW_TOKENS, MANY_TOKENS = 2, 26


def measure_plain(
    shape: Shape, cell: Cell, acceptance: SyntheticAcceptance, num_cycles: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Cycle]:
    """The plain loop without and with drafts, rows of `cell.context` positions before the first cycle."""
    k = shape.num_speculative_tokens
    length = cell.context + (WARM_UP + num_cycles) * (k + 1) + 2 * (k + 1)
    pair = PlainPair(
        shape, target_tensors(shape, dtype, device), draft_tensors(shape, dtype, device), cell.batch, length
    )
    tokens = torch.ones(cell.batch, 1, dtype=torch.int64, device=device)
    lengths = torch.full((cell.batch,), cell.context, dtype=torch.int64, device=device)

    def decode() -> None:
        nonlocal tokens, lengths
        tokens, lengths = pair.decode(tokens, lengths), lengths + 1

    seconds = _seconds_each(decode, num_cycles, device)
    yield Cycle(shape.name, PLAIN, cell.batch, cell.context, cell.context, 0, num_cycles, seconds, cell.batch / seconds)

    drawn = torch.tensor(acceptance.draw((WARM_UP + num_cycles) * cell.batch, seed=0), device=device)
    accepted = iter(drawn.view(-1, cell.batch))
    tokens = torch.ones(cell.batch, 1 + k, dtype=torch.int64, device=device)
    lengths = torch.full((cell.batch,), cell.context, dtype=torch.int64, device=device)

    def cycle() -> None:
        nonlocal tokens, lengths
        tokens, lengths = pair.cycle(tokens, lengths, next(accepted))

    seconds = _seconds_each(cycle, num_cycles, device)
    mean_length = 1 + float(drawn[WARM_UP * cell.batch :].double().mean())
    rate = cell.batch * mean_length / seconds
    yield Cycle(shape.name, PLAIN_DFLASH, cell.batch, cell.context, cell.context, k, num_cycles, seconds, rate)


def measure_transformers(shape: Shape, cells: list[Cell], dtype: torch.dtype, device: torch.device) -> Iterator[Cycle]:
    """`generate`, greedy, on the same weights: the time of a token is that of many tokens less that of few. Raises
    ImportError without `transformers`."""
    model = load_transformers(shape, dtype, device)
    for cell in cells:
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(0, shape.target.vocab_size, (cell.batch, cell.context), generator=generator).to(device)

        _generate(model, prompt, FEW_TOKENS)  # warm-up
        few, many = (_seconds(partial(_generate, model, prompt, count), device) for count in (FEW_TOKENS, MANY_TOKENS))
        num_steps = MANY_TOKENS - FEW_TOKENS
        seconds = (many - few) / num_steps
        rate = cell.batch / seconds
        yield Cycle(shape.name, TRANSFORMERS, cell.batch, cell.context, cell.context, 0, num_steps, seconds, rate)


def load_transformers(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The shape's target in `transformers`, with the weights that the engine has."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    target, decoder = shape.target, shape.target.decoder
    configs = {"Qwen3ForCausalLM": Qwen3Config, "LlamaForCausalLM": LlamaConfig}
    if target.architecture not in configs:
        raise ImportError(f"the comparison has no configuration of {target.architecture} for transformers")
    config = configs[target.architecture](
        vocab_size=target.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_hidden_layers=decoder.num_layers,
        num_attention_heads=decoder.num_heads,
        num_key_value_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        max_position_embeddings=decoder.max_len,
        rms_norm_eps=decoder.rms_norm_eps,
        tie_word_embeddings=False,
        rope_parameters=_rope_parameters(decoder.rope),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tensors = target_tensors(shape, dtype, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.make(name))
    return model


def _rope_parameters(rope: RopeSpec) -> dict[str, object]:
    """As transformers 5 has them."""
    parameters: dict[str, object] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "llama3":
        parameters |= {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return parameters


def release(device: torch.device) -> None:
    """Give the memory of what is no longer referred to back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _seconds_each(work: Callable[[], None], count: int, device: torch.device) -> float:
    """Wall time of one call in the mean over `count`, the device's work included."""
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / count


def _generate(model: torch.nn.Module, prompt: torch.Tensor, count: int) -> None:
    """Exactly `count` greedy tokens after each row of `prompt`."""
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started
