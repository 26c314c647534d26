"""Defects all over the project that no test had noticed when they were first planted: kernels, models, speculation, the
worker, the wiring of settings, Triton's package and the client."""

from __future__ import annotations

from tests.mutations.mutant import Mutant

BUILD = "dflash_backend/engine/build.py"
TEXT = "dflash_backend/text"
TRITON = "dflash_backend/triton"
WORKER = "dflash_backend/worker"
ACCEPT = "kernels/dflash_kernels/accept.py"
SETTINGS = ("tests/test_settings.py",)
FRONTEND_SETTINGS = ("tests/triton/test_settings.py",)
LATENCIES = ("tests/triton/test_latencies.py",)
METRICS = ("tests/triton/test_metrics.py",)
GUARD = ("tests/worker/test_write_guard.py",)
REJECTION = ("tests/sampling/test_verify.py",)
DETOKENIZER = ("tests/text/test_detokenizer.py",)

PLANTED = (
    Mutant(
        "one random number judges all drafts of a row",
        ACCEPT,
        "positions = torch.from_numpy(self.first[:, None] + column)",
        "positions = torch.from_numpy(self.first[:, None] + column * 0)",
        (*REJECTION, "tests/kernels/test_accept.py"),
        ((ACCEPT, "first + column, accept_stream)", "first + column * 0, accept_stream)"),),
    ),
    Mutant(
        "min_p is judged before the temperature",
        "kernels/dflash_kernels/filtered_softmax.py",
        "probs = scaled.softmax(dim=-1)",
        "probs = logits.float().softmax(dim=-1)",
        ("tests/kernels/test_sampling.py::test_the_cuts_see_the_probabilities_at_the_temperature",),
        (
            (
                "kernels/dflash_kernels/filtered_softmax.py",
                "lowest_kept = tl.maximum(lowest_kept, top + temperature * tl.log(min_p))",
                "lowest_kept = tl.maximum(lowest_kept, top + tl.log(min_p))",
            ),
        ),
    ),
    Mutant(
        "top_p, top_k and min_p never reach the device",
        f"{WORKER}/state.py",
        "(state.top_p, self.top_p),",
        "(state.top_p, np.ones_like(self.top_p)),",
        ("tests/test_device_lossless.py::test_each_cut_of_these_requests_changes_what_is_drawn",),
        (
            (f"{WORKER}/state.py", "(state.min_p, self.min_p),", "(state.min_p, np.zeros_like(self.min_p)),"),
            (f"{WORKER}/state.py", "(state.top_k, self.top_k),", "(state.top_k, np.zeros_like(self.top_k)),"),
        ),
    ),
    Mutant(
        "the cuts are lost where parameters are repeated for each distribution",
        f"{WORKER}/state.py",
        "            any_top_k_or_p,\n            any_min_p,\n        )",
        "            False,\n            False,\n        )",
        ("tests/sampling/test_filtered_softmax.py",),
    ),
    Mutant(
        "mask queries past the eighth are rotated as the eighth",
        "dflash_backend/drafters/dflash/drafter.py",
        "            batch.positions,\n            batch.slots,",
        "            torch.minimum(batch.positions, torch.from_numpy("
        "(batch.layout.seq_lens - batch.layout.query_lens + 8).repeat(batch.layout.query_lens))),\n"
        "            batch.slots,",
        ("tests/drafters/test_dflash.py",),
    ),
    Mutant(
        "requests without speculation leave no drafter K/V in the blocks that they publish",
        f"{WORKER}/step_ops.py",
        "final = slots.numpy() >= 0",
        "plain = (batch.num_next.numpy() == 0) & (batch.logits_start.numpy() >= 0)\n"
        "        final = (slots.numpy() >= 0) & ~plain[batch.token_row.numpy()]",
        ("tests/worker/test_mixed_speculation.py",),
    ),
    Mutant(
        "a cache salt's letters beyond ASCII are dropped",
        "dflash_backend/core/prefix_cache.py",
        'cache_salt.encode("utf-8", "surrogatepass")',
        'cache_salt.encode("ascii", "ignore")',
        ("tests/core/test_prefix_cache.py",),
    ),
    Mutant(
        "the inject phase is not guarded",
        f"{WORKER}/step.py",
        'guard.check("inject", token_row, final.slots)',
        "pass",
        GUARD,
    ),
    Mutant(
        "the verify phase is not guarded",
        f"{WORKER}/step.py",
        'guard.check("verify", inputs.batch.token_row, prepared.slots, inputs.batch.query_lens)',
        "pass",
        GUARD,
    ),
    Mutant(
        "the draft phase is not guarded",
        f"{WORKER}/step.py",
        "guard.check_draft(draft, inputs.batch.num_next, drafter.lookahead_base)",
        "pass",
        ("tests/worker/test_runner.py::test_each_phase_that_writes_is_checked",),
    ),
    Mutant(
        "request_timeout_s is not sent to the engine",
        f"{TRITON}/service.py",
        "self._config.request_timeout_s)",
        "0.0)",
        FRONTEND_SETTINGS,
    ),
    Mutant(
        "draft_sample_method does nothing",
        BUILD,
        'config.draft_sample_method == "greedy",',
        "False,",
        SETTINGS,
    ),
    Mutant("the setting seed does nothing", BUILD, "seed=config.seed,", "seed=0,", SETTINGS),
    Mutant("enable_overlap does nothing", BUILD, "trace, config.enable_overlap)", "trace, True)", SETTINGS),
    Mutant(
        "max_prefill_tokens_per_step does nothing",
        BUILD,
        "max_prefill_tokens_per_step=config.max_prefill_tokens_per_step",
        "max_prefill_tokens_per_step=None",
        SETTINGS,
    ),
    Mutant(
        "queries and hits of the prefix cache change places",
        f"{TRITON}/metrics.py",
        '"prefix_cache_queries": "dflash:prefix_cache_queries_total",',
        '"prefix_cache_queries": "dflash:prefix_cache_hits_total",',
        METRICS,
        (
            (
                f"{TRITON}/metrics.py",
                '"prefix_cache_hits": "dflash:prefix_cache_hits_total",',
                '"prefix_cache_hits": "dflash:prefix_cache_queries_total",',
            ),
        ),
    ),
    Mutant(
        "the time per output token counts the first token",
        f"{TRITON}/request_metrics.py",
        "(now - state.first_token_at) / (longest - 1)",
        "(now - state.first_token_at) / longest",
        LATENCIES,
    ),
    Mutant(
        "time to first token is the whole latency",
        f"{TRITON}/request_metrics.py",
        "state.first_token_at - state.arrived_at)",
        "now - state.arrived_at)",
        LATENCIES,
    ),
    Mutant(
        "buckets of seconds are milliseconds",
        f"{TRITON}/metrics.py",
        "_Histogram(self._specs[name].buckets)",
        "_Histogram(tuple(1000 * bound for bound in self._specs[name].buckets))",
        METRICS,
    ),
    Mutant(
        "the queue time of several completions is the longest",
        f"{TEXT}/output.py",
        "return min(completion.stats.queue_time_s",
        "return max(completion.stats.queue_time_s",
        LATENCIES,
    ),
    Mutant(
        "a stop string counts that ends in the last of min_tokens",
        f"{TEXT}/detokenizer.py",
        "search=self._num_unsearched < 0)",
        "search=self._num_unsearched <= 0)",
        DETOKENIZER,
    ),
)

# Cheap ones, over all packages, that every run of the tests applies.
SMOKE = (
    "one random number judges all drafts of a row",
    "a cache salt's letters beyond ASCII are dropped",
    "the inject phase is not guarded",
    "max_prefill_tokens_per_step does nothing",
    "queries and hits of the prefix cache change places",
    "the first block that a window shows is one too late",
    "draft ids of a cut vocabulary are taken for the target's",
    "a torn character at the end is lost",
    "only the first end-of-sequence id ends an answer",
    "a client sends again past its time-out",
)
