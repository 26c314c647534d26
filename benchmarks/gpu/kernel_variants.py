"""Which kernels are compiled at the start, and that a workload adds none; launches of a decode cycle and a mixed step.

    python -m benchmarks.gpu.kernel_variants

needs no GPU: Triton's own binder says which launches need a kernel of their own, and a driver that runs nothing counts
them (`counting_driver`). The engines are those that serve, over random weights with the heads of published models.
It prints what it finds and exits with 1 when a workload would have waited for the compiler.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.counting_driver import CompiledKernel, KernelCounts, install
from benchmarks.gpu.launch_time import Launches, launch_seconds, recorded
from benchmarks.gpu.shapes import (
    RandomTensors,
    Shape,
    _decoder,
    _draft,
    _target,
    block_drafter_class,
    draft_tensors,
    target_tensors,
)
from dflash_backend.attention import AttentionBackend
from dflash_backend.attention.triton_backend import TritonBackend
from dflash_backend.checkpoints.spec import ClampedSwiglu, DeltaNetSpec, MoeSpec
from dflash_backend.checkpoints.weights import expected_tensors
from dflash_backend.config import asset_path
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.scheduler_config import SchedulerConfig, max_positions
from dflash_backend.drafters.base import Drafter
from dflash_backend.drafters.dflash2.config import ConvSpec, DFlash2Spec, SelectorSpec
from dflash_backend.drafters.dspark.config import GATED, RNN, DSparkSpec, MarkovSpec
from dflash_backend.drafters.eagle3.config import Eagle3Spec
from dflash_backend.drafters.eagle3.drafter import Eagle3Drafter, Eagle3Model, Eagle3Weights
from dflash_backend.drafters.ngram.config import NgramSpec
from dflash_backend.drafters.ngram.drafter import NgramDrafter
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.messages import GenerationRequest, SamplingParams, StructuredOutputs
from dflash_backend.models.decoder import DecoderTarget, TargetWeights
from dflash_backend.models.ops import select_ops
from dflash_backend.models.recurrent_state import StatePool
from dflash_backend.structured_output.compiler import GrammarCompiler
from dflash_backend.text.tokenizer import tokenizer_json
from dflash_backend.worker.graphs import capture_shapes, warm_up
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.runner import ModelRunner
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step import SpecDecodeModel
from dflash_backend.worker.step_ops import select_step_ops
from dflash_kernels import scaled_linear
from dflash_kernels.quantised_weight import FP8, INT4, MXFP4

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_TOKENS = 16, 2048, 4096, 2048
# Several tiles of logits; the demo pair's tokenizer, for requests with a grammar, has fewer.
VOCAB_SIZE = 5008
STEM = [11] * 600
COPIES = 8  # of states, for prefix hits
REGEX = StructuredOutputs("regex", "[a-z]{1,9}")


@dataclass(frozen=True)
class Case:
    """An engine: its target, and how it drafts. markov: the Markov head of a DSpark drafter. shared: all prompts begin
    alike, and their KV is read together. gpt_oss: experts have biases and a clamped gate. hybrid: half of the target's
    layers keep a state. quantised: what the projections of both models, or gpt-oss's experts, are kept in.
    fp8_activations: those of the target become FP8."""

    name: str
    k: int = 15
    moe: bool = False
    gpt_oss: bool = False
    ngram: bool = False
    dflash2: bool = False
    markov: str | None = None
    eagle3: bool = False
    adaptive: bool = False
    window: int | None = None
    max_num_seqs: int = 16
    batch_invariant: bool = False
    shared: bool = False
    hybrid: bool = False
    quantised: str | None = None
    fp8_activations: bool = False


CASES = (
    Case("dense, k = 15", max_num_seqs=64),
    Case("dense, adaptive k", adaptive=True),
    Case("dense, k = 3, shared prefix", k=3, shared=True),
    Case("dense, k = 3", k=3),
    Case("dense, k = 0", k=0),
    Case("n-grams, k = 5", k=5, ngram=True),
    Case("experts, k = 15", moe=True),
    Case("experts, adaptive k", moe=True, adaptive=True),
    Case("drafter with windows", window=512),
    Case("DFlash2, k = 7", k=7, dflash2=True),
    Case("DFlash2, adaptive k", k=7, dflash2=True, adaptive=True),
    Case("DSpark, k = 7", k=7, markov=RNN),
    Case("DSpark, adaptive k", k=7, markov=GATED, adaptive=True),
    Case("EAGLE-3, k = 4", k=4, eagle3=True),
    Case("EAGLE-3, adaptive k", k=4, eagle3=True, adaptive=True),
    Case("dense, batch-invariant", adaptive=True, batch_invariant=True),
    Case("experts, batch-invariant", moe=True, batch_invariant=True),
    Case("gated delta nets, k = 15", hybrid=True),
    Case("gated delta nets, k = 23, adaptive", k=23, hybrid=True, adaptive=True),
    Case("FP8 weights, adaptive k", adaptive=True, max_num_seqs=64, quantised=FP8),
    Case("INT4 weights, k = 7", k=7, max_num_seqs=64, quantised=INT4),
    Case("FP8 weights, batch-invariant", batch_invariant=True, quantised=FP8),
    Case("FP8 experts, batch-invariant", moe=True, batch_invariant=True, quantised=FP8),
    Case("INT4 experts, k = 15", moe=True, quantised=INT4),
    Case("experts in MXFP4, k = 7", k=7, gpt_oss=True, quantised=MXFP4),
    Case("gated delta nets, FP8 weights, k = 15", hybrid=True, quantised=FP8),
    Case("FP8 experts, adaptive k", moe=True, adaptive=True, quantised=FP8),
    Case("FP8 weights and activations, k = 7", k=7, max_num_seqs=64, quantised=FP8, fp8_activations=True),
    Case("FP8 both, batch-invariant", k=7, batch_invariant=True, quantised=FP8, fp8_activations=True),
)


def shape_of(case: Case) -> Shape:
    """Heads, vocabulary and experts as large models have them, everything else small."""
    rest: dict[str, Any] = {}
    if case.moe:
        rest["moe"] = MoeSpec(128, 8, 32, norm_topk_prob=True, sparse_layers=(True, True))
    kv_heads = 4 if case.moe else 8
    architecture = "Qwen3MoeForCausalLM" if case.moe else "Qwen3ForCausalLM"
    if case.gpt_oss:
        architecture = "GptOssForCausalLM"
        moe = MoeSpec(32, 4, 32, True, (True, True), swiglu=ClampedSwiglu(1.702, 7.0), mxfp4=True)
        rest |= {"moe": moe, "sinks": True, "qk_norm": False}
    if case.hybrid:
        architecture = "Qwen3_5ForCausalLM"
        net = DeltaNetSpec((True, False), 2, 4, 128, 128, 4, grouped=False)
        rest |= {"delta_net": net, "attention_gate": True, "centred_norms": True, "rotary_dim": 64}
    target = _target(architecture, _decoder(2, 64, 128, 32, kv_heads, 128, **rest), VOCAB_SIZE)
    decoder = _decoder(1 if case.eagle3 else 2, 64, 128, 32, kv_heads, 128)
    if case.window:
        decoder = replace(decoder, sliding_windows=(case.window, None))
    draft = _draft(target, decoder, max(case.k, 1) + 1, 2)
    if case.dflash2:
        draft = DFlash2Spec(**vars(draft), conv=ConvSpec(2, 16), selector=SelectorSpec(256, 16))
    if case.markov:
        markov = MarkovSpec(case.markov, 256)
        own: dict[str, Any] = {"from_anchor": True, "has_confidence_head": True, "confidence_reads_markov": True}
        draft = DSparkSpec(**vars(draft), markov=markov, **own)
    return Shape(case.name, target, draft)


def model_step(case: Case) -> SpecDecodeModel:
    """The models with kernels in place of references, on the CPU."""
    shape = shape_of(case)
    positions = max_positions(MAX_MODEL_LEN, case.k)
    fp8_activations = DTYPE if case.fp8_activations else None
    ops, plain = select_ops(CPU, "triton", case.batch_invariant, fp8_activations), TritonBackend(BLOCK_SIZE)
    backend = plain.batch_invariant() if case.batch_invariant else plain
    weights = TargetWeights.read(target_tensors(shape, DTYPE, CPU, case.quantised), shape.target)
    # No kernel runs here, so a trial of torch's scaled products beside ours would say nothing.
    with mock.patch.object(scaled_linear, "trial", return_value=None):
        target = DecoderTarget(shape.target, weights, positions, ops)
    kv = PagedKVCache.allocate(shape.target.decoder, shape.draft.decoder, NUM_BLOCKS, BLOCK_SIZE, DTYPE, CPU)
    return SpecDecodeModel(
        target,
        _drafter(case, shape, target, kv, plain),
        kv,
        backend,
        select_step_ops(CPU, "triton"),
        StateTensors.allocate(case.max_num_seqs, MAX_MODEL_LEN, case.k, BLOCK_SIZE, VOCAB_SIZE, CPU),
        draft_temperature_ratio=1.0,
        dtype=DTYPE,
        wants_confidence=case.adaptive,
        draft_backend=plain,
        pool=StatePool.allocate(shape.target.decoder, case.max_num_seqs + COPIES, DTYPE, CPU) if case.hybrid else None,
        shares_prefixes=case.shared,
    )


def _drafter(
    case: Case, shape: Shape, target: DecoderTarget, kv: PagedKVCache, backend: AttentionBackend
) -> Drafter[Any] | None:
    if not case.k:
        return None
    ops = select_ops(CPU, "triton")
    if case.ngram:
        return NgramDrafter(NgramSpec(num_speculative_tokens=case.k, min_ngram=2, max_ngram=5), ops)
    if case.eagle3:
        return _eagle3(case, shape, target, kv, backend)
    drafter = block_drafter_class(shape.draft)
    weights = drafter.model_class.weights_class.read(draft_tensors(shape, DTYPE, CPU, case.quantised), shape.draft)
    model = drafter.model_class(shape.draft, weights, max_positions(MAX_MODEL_LEN, case.k), ops)
    return drafter(model, target, kv.draft, backend)


def _eagle3(
    case: Case, shape: Shape, target: DecoderTarget, kv: PagedKVCache, backend: AttentionBackend
) -> Eagle3Drafter:
    """An EAGLE-3 drafter with the sizes of the shape's, whose layer has Llama's form."""
    names = {each.name for each in fields(DraftModelSpec)}
    common = {name: value for name, value in vars(shape.draft).items() if name in names}
    decoder = replace(shape.draft.decoder, qk_norm=False)
    spec = Eagle3Spec(**{**common, "decoder": decoder, "causal": (True,)}, layer_prefix="midlayer.")
    tensors = RandomTensors(expected_tensors(lambda source: Eagle3Weights.read(source, spec)), DTYPE, CPU, seed=1)
    model = Eagle3Model(
        spec, Eagle3Weights.read(tensors, spec), max_positions(MAX_MODEL_LEN, case.k), select_ops(CPU, "triton")
    )
    return Eagle3Drafter(model, target, kv.draft, backend)


def scheduler_config(case: Case, drafter: Drafter[Any] | None, shapes: tuple[tuple[int, int], ...]) -> SchedulerConfig:
    """As `engine.build` makes it for a GPU."""
    return SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=MAX_TOKENS,
        max_queue_size=1000,
        enable_prefix_caching=True,
        num_speculative_tokens=case.k,
        adaptive_speculation=case.adaptive,
        draft_shapes=tuple(shape for shape in shapes if shape[0]),
        lookahead_base=drafter.lookahead_base if drafter else 0,
        autoregressive=drafter is not None and drafter.autoregressive,
        reads_next_tokens=drafter is not None and drafter.reads_next_tokens,
        drafter_max_len=max_positions(MAX_MODEL_LEN, case.k) if drafter else 0,
        min_prefill_tokens_per_step=256,
        min_shared_positions=512 * case.shared,
        num_state_snapshots=COPIES if case.hybrid else None,
    )


class CountedEngine:
    """An engine of a case that has been started as on a GPU, and what it compiled then."""

    def __init__(self, case: Case, counts: KernelCounts) -> None:
        self.case, self.counts = case, counts
        step = model_step(case)
        grammars = GrammarCompiler(lambda: tokenizer_json(asset_path("demo", "pair", "target")), VOCAB_SIZE)
        self.runner = ModelRunner(step, MAX_TOKENS, grammars=grammars)
        shapes = tuple(capture_shapes(case.k)) if case.adaptive else ()
        # The padded steps are made and not run: a server without graphs starts so, and one that lacks memory for some.
        self.runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=shapes)
        counts.start_process()
        with torch.inference_mode():
            warm_up(step, self.runner.layouts, MAX_TOKENS, [width for _, width in shapes])
        self.at_start = counts.take_compiled()
        config = scheduler_config(case, step.drafter, shapes)
        self.core = EngineCore(config, self.runner, overlap=True, grammars=grammars)
        self._num_requests = 0
        self.recorded: Launches = []

    def run(self, requests: list[tuple[list[int], dict[str, Any]]], at_once: bool, max_steps: int = 2000) -> None:
        """Run requests to their end, added together or one every other step."""
        pending = list(requests)
        for step in range(max_steps):
            while pending and (at_once or step % 2 == 0):
                prompt, sampling = pending.pop()
                self._num_requests += 1
                params = SamplingParams(**sampling)
                self.core.add_request(GenerationRequest(f"request-{self._num_requests}", prompt, params, (2,)))
                if not at_once:
                    break
            if not pending and not self.core.has_unfinished():
                return
            self.core.step()
        raise RuntimeError(f"{self.case.name}: requests are left after {max_steps} steps")

    def launches(self, prompt_len: int) -> Counter[str]:
        """Kernels of one step: of eight requests that decode and, with `prompt_len`, a prompt of that length."""
        for _ in range(8):
            self._add([7] * 40, max_tokens=200)
        for _ in range(6):
            self.core.step()
        if prompt_len:
            self._add([7] * prompt_len, max_tokens=1)
        self.counts.launches.clear()
        with recorded() as recording:
            self.core.step()
        launches = Counter(self.counts.launches)
        self.recorded = recording
        self.core.abort([f"request-{number}" for number in range(self._num_requests + 1)])
        while self.core.has_unfinished():
            self.core.step()
        return launches

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        self._num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add_request(GenerationRequest(f"request-{self._num_requests}", prompt, params, ()))


def workload(rng: random.Random, case: Case) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, of one length or of many, and what their requests ask for."""
    count = rng.choice([1, 1, 2, 4, 4, 8, 12, 20])
    longest = rng.choice([1, 4, 15, 40, 130, 600, 2300])
    equal = rng.random() < 0.4
    kind = rng.choice(["greedy", "sampled", "filtered", "mixed", "special", "all"])
    requests = []
    for _ in range(count):
        length = longest if equal else rng.randint(1, longest)
        sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 9, 30]), "temperature": 0.0}
        if kind in ("sampled", "filtered", "all") or (kind == "mixed" and rng.random() < 0.5):
            sampling |= {"temperature": 0.8, "seed": rng.randrange(1000)}
        if kind in ("filtered", "all"):
            sampling |= rng.choice([{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}])
        if kind in ("special", "all"):
            sampling |= rng.choice(_special(rng, case))
        prompt = [rng.randrange(3, VOCAB_SIZE - 1) for _ in range(length)]
        requests.append((STEM * case.shared + prompt, sampling))
    return requests


def _special(rng: random.Random, case: Case) -> list[dict[str, Any]]:
    return [
        {"logprobs": rng.choice([0, 3])},
        {"prompt_logprobs": 2},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"min_tokens": 1, "stop_token_ids": (5,)},
        {"logit_bias": {7: 2.0}},
        {"allowed_token_ids": (5, 6, 7)},
        {"structured_outputs": REGEX},
        {"num_speculative_tokens": rng.randint(0, case.k)},
    ]


def additions(engine: CountedEngine, num_workloads: int, seed: int) -> Iterator[tuple[int, CompiledKernel]]:
    """The kernels that workloads would have to wait for, each with its workload's number."""
    rng = random.Random(seed)
    for number in range(num_workloads):
        engine.run(workload(rng, engine.case), at_once=rng.random() < 0.6)
        for kernel in engine.counts.take_compiled():
            yield number, kernel


def describe(engine: CountedEngine) -> str:
    """Kernels at the start, launches of a decode cycle and of a mixed step."""
    decode, mixed = engine.launches(0), engine.launches(300)
    by_triton, ours = launch_seconds(engine.recorded)
    names = Counter(kernel.name for kernel in engine.at_start)
    lines = [
        f"{engine.case.name}: {sum(names.values())} kernels compiled at the start, {decode.total()} launches in a "
        f"decode cycle of 8 rows, {mixed.total()} in a step of them with a prompt of 300 tokens, whose host time is "
        f"{1e6 * ours:.0f} us, {1e6 * by_triton:.0f} us by Triton's own launches ({ours / by_triton:.2f})"
    ]
    for title, counts in (("compiled", names), ("decode", decode), ("mixed", mixed)):
        lines.append(f"  {title}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=200, help="of all engines together (%(default)s)")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = install()
    cases = [case for case in CASES if not args.case or case.name in args.case]
    num_added = 0
    for case in cases:
        engine = CountedEngine(case, counts)
        for number, kernel in additions(engine, -(-args.workloads // len(cases)), args.seed):
            num_added += 1
            print(f"{case.name}: workload {number} would wait for {kernel.describe()}")
        print(describe(engine), flush=True)
    print(f"{num_added} kernels compiled in service")
    return int(num_added > 0)


if __name__ == "__main__":
    sys.exit(main())
