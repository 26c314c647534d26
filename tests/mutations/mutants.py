"""All defects that the tests must notice, each a replacement of text."""

from __future__ import annotations

from tests.mutations.budget_cost import BUDGET_COST_MUTANTS
from tests.mutations.clients import CLIENTS_MUTANTS
from tests.mutations.continued import CONTINUED_MUTANTS
from tests.mutations.core import CORE_MUTANTS
from tests.mutations.cpu_ops import CPU_OPS_MUTANTS
from tests.mutations.delta_streams import DELTA_STREAM_MUTANTS
from tests.mutations.deployment import DEPLOYMENT_MUTANTS
from tests.mutations.dflash2 import DFLASH2_MUTANTS
from tests.mutations.drafter_swap import DRAFTER_SWAP_MUTANTS
from tests.mutations.drafters import DRAFTERS_MUTANTS
from tests.mutations.dspark import DSPARK_MUTANTS
from tests.mutations.eagle3 import EAGLE3_MUTANTS
from tests.mutations.engine_process import ENGINE_PROCESS_MUTANTS
from tests.mutations.filters import FILTER_MUTANTS
from tests.mutations.fp8_kv import FP8_KV_MUTANTS
from tests.mutations.front_end import FRONT_END_MUTANTS
from tests.mutations.gemma4 import GEMMA4_MUTANTS
from tests.mutations.gguf import GGUF_MUTANTS
from tests.mutations.gpt_oss import GPT_OSS_MUTANTS
from tests.mutations.gpu_benchmark import GPU_BENCHMARK_MUTANTS
from tests.mutations.gpu_ranks import GPU_RANK_MUTANTS
from tests.mutations.grammar import GRAMMAR_MUTANTS
from tests.mutations.hub import HUB_MUTANTS
from tests.mutations.hybrids import HYBRID_MUTANTS
from tests.mutations.installing import INSTALLING_MUTANTS
from tests.mutations.interrupts import INTERRUPT_MUTANTS
from tests.mutations.invariance import INVARIANCE_MUTANTS
from tests.mutations.kept_experts import KEPT_EXPERTS_MUTANTS
from tests.mutations.kept_mxfp4 import KEPT_MXFP4_MUTANTS
from tests.mutations.kept_weights import KEPT_WEIGHTS_MUTANTS
from tests.mutations.kv_tiers import KV_TIER_MUTANTS
from tests.mutations.large_requests import LARGE_REQUEST_MUTANTS
from tests.mutations.launcher import LAUNCHER_MUTANTS
from tests.mutations.lora import LORA_MUTANTS
from tests.mutations.many_tenants import MANY_TENANTS_MUTANTS
from tests.mutations.measured_products import MEASURED_PRODUCTS_MUTANTS
from tests.mutations.measuring import MEASURING_MUTANTS
from tests.mutations.mixed_steps import MIXED_STEP_MUTANTS
from tests.mutations.overlap import OVERLAP_MUTANTS
from tests.mutations.parallel import PARALLEL_MUTANTS
from tests.mutations.parsing import PARSING_MUTANTS
from tests.mutations.penalties import PENALTY_MUTANTS
from tests.mutations.prefill import PREFILL_MUTANTS
from tests.mutations.quantised import QUANTISED_MUTANTS
from tests.mutations.read_ahead import READ_AHEAD_MUTANTS
from tests.mutations.remote_ranks import REMOTE_RANK_MUTANTS
from tests.mutations.resting import RESTING_MUTANTS
from tests.mutations.routing import ROUTING_MUTANTS
from tests.mutations.sampling import SAMPLING_MUTANTS
from tests.mutations.scaled_products import SCALED_PRODUCT_MUTANTS
from tests.mutations.scheduling import SCHEDULING_MUTANTS
from tests.mutations.security import SECURITY_MUTANTS
from tests.mutations.serving import SERVING_MUTANTS
from tests.mutations.shared_prefixes import SHARED_PREFIX_MUTANTS
from tests.mutations.snapshots import SNAPSHOT_MUTANTS
from tests.mutations.special_rows import SPECIAL_MUTANTS
from tests.mutations.speculation import SPECULATION_MUTANTS
from tests.mutations.text import TEXT_MUTANTS
from tests.mutations.training import TRAINING_MUTANTS
from tests.mutations.values import VALUE_MUTANTS
from tests.mutations.vocabulary import VOCABULARY_MUTANTS
from tests.mutations.windows import WINDOW_MUTANTS
from tests.mutations.worker import WORKER_MUTANTS

MUTANTS = CORE_MUTANTS + SCHEDULING_MUTANTS + OVERLAP_MUTANTS + WORKER_MUTANTS + SAMPLING_MUTANTS
MUTANTS += (
    DRAFTERS_MUTANTS
    + SERVING_MUTANTS
    + SPECULATION_MUTANTS
    + BUDGET_COST_MUTANTS
    + PARSING_MUTANTS
    + GRAMMAR_MUTANTS
    + GGUF_MUTANTS
)
MUTANTS += (
    TRAINING_MUTANTS
    + SECURITY_MUTANTS
    + FRONT_END_MUTANTS
    + DFLASH2_MUTANTS
    + DSPARK_MUTANTS
    + EAGLE3_MUTANTS
    + INVARIANCE_MUTANTS
)
MUTANTS += GPT_OSS_MUTANTS + QUANTISED_MUTANTS + PARALLEL_MUTANTS + HYBRID_MUTANTS + ROUTING_MUTANTS + GEMMA4_MUTANTS
MUTANTS += (
    DRAFTER_SWAP_MUTANTS
    + MANY_TENANTS_MUTANTS
    + INTERRUPT_MUTANTS
    + SNAPSHOT_MUTANTS
    + FP8_KV_MUTANTS
    + WINDOW_MUTANTS
    + READ_AHEAD_MUTANTS
)
MUTANTS += (
    SPECIAL_MUTANTS
    + SHARED_PREFIX_MUTANTS
    + LAUNCHER_MUTANTS
    + INSTALLING_MUTANTS
    + CPU_OPS_MUTANTS
    + RESTING_MUTANTS
    + PREFILL_MUTANTS
)
MUTANTS += GPU_BENCHMARK_MUTANTS + CONTINUED_MUTANTS + KEPT_WEIGHTS_MUTANTS + REMOTE_RANK_MUTANTS + GPU_RANK_MUTANTS
MUTANTS += CLIENTS_MUTANTS
MUTANTS += (
    TEXT_MUTANTS + FILTER_MUTANTS + MIXED_STEP_MUTANTS + KEPT_EXPERTS_MUTANTS + VOCABULARY_MUTANTS + KEPT_MXFP4_MUTANTS
)
MUTANTS += HUB_MUTANTS + PENALTY_MUTANTS + SCALED_PRODUCT_MUTANTS + LARGE_REQUEST_MUTANTS + ENGINE_PROCESS_MUTANTS
MUTANTS += KV_TIER_MUTANTS + DELTA_STREAM_MUTANTS + DEPLOYMENT_MUTANTS + VALUE_MUTANTS + MEASURED_PRODUCTS_MUTANTS
MUTANTS += MEASURING_MUTANTS + LORA_MUTANTS

# Every run of the tests applies these: cheap ones, of every package.
SMOKE = (
    "RESERVE: no lookahead on a prefill",
    "PUBLISH: the last full block of a hit is dropped",
    "protected blocks never grow old",
    "the oldest request is preempted",
    "a result goes to the request that has the id now",
    "penalties do not count drafts",
    "a cache salt's letters beyond ASCII are dropped",
    "the inject phase is not guarded",
    "max_prefill_tokens_per_step does nothing",
    "queries and hits of the prefix cache change places",
    "the first block that a window shows is one too late",
    "draft ids of a reduced vocabulary are taken for the target's",
    "a torn character at the end is lost",
    "only the first end-of-sequence id ends an answer",
    "a client sends again past its time-out",
    "a bit of a mask belongs to the token behind",
)
