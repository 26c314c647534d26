"""What reaches Triton's metrics page."""

from dflash_backend.frontend.metrics import METRICS, Metrics
from dflash_backend.messages import EngineStats
from tests.frontend.fake_triton import FakeTriton


def test_counters_follow_the_engine_by_what_was_added():
    triton = FakeTriton()
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)
    for drafts in (3, 3, 10):
        metrics.follow(EngineStats(num_drafts=drafts, num_accepted_tokens_per_pos=[drafts, 1], kv_cache_usage=0.5))
        metrics.flush()
    assert triton.values["dflash:spec_decode_num_drafts_total",] == 10
    assert triton.values["dflash:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 10
    assert triton.values["dflash:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert triton.values["dflash:kv_cache_usage_perc", "m_0_0"] == 0.5


def test_every_metric_without_further_labels_is_there_from_the_start():
    triton = FakeTriton()
    Metrics(triton, "m", "m_0_0", triton.lines.append)
    assert triton.values["dflash:num_preemptions_total",] == 0
    assert ("dflash:e2e_request_latency_seconds",) in triton.values


def test_a_triton_without_histograms_gets_sums_and_counts_and_the_log_says_so_once():
    triton = FakeTriton(histograms=False)
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)
    metrics.observe("dflash:e2e_request_latency_seconds", 0.25)
    metrics.observe("dflash:e2e_request_latency_seconds", 0.5)
    metrics.flush()
    assert triton.values["dflash:e2e_request_latency_seconds_sum",] == 0.75
    assert triton.values["dflash:e2e_request_latency_seconds_count",] == 2
    assert len([line for line in triton.lines if "_sum and _count" in line]) == 1


def test_every_figure_of_the_engine_reaches_the_metric_that_is_named_after_it():
    """Each figure is another number, so that two that change places are noticed."""
    stats = EngineStats(
        num_requests_running=101,
        num_requests_waiting=102,
        kv_cache_usage=0.103,
        num_preemptions=104,
        prefix_cache_queries=105,
        prefix_cache_hits=106,
        num_drafts=107,
        num_draft_tokens=108,
        num_accepted_tokens=109,
        num_accepted_tokens_per_pos=[110, 111],
    )
    triton = FakeTriton()
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)
    metrics.follow(stats)
    metrics.flush()
    found = {name: value for name, value in triton.values.items() if value}
    assert found == {
        ("dflash:num_requests_running", "m_0_0"): 101,
        ("dflash:num_requests_waiting", "m_0_0"): 102,
        ("dflash:kv_cache_usage_perc", "m_0_0"): 0.103,
        ("dflash:num_preemptions_total",): 104,
        ("dflash:prefix_cache_queries_total",): 105,
        ("dflash:prefix_cache_hits_total",): 106,
        ("dflash:spec_decode_num_drafts_total",): 107,
        ("dflash:spec_decode_num_draft_tokens_total",): 108,
        ("dflash:spec_decode_num_accepted_tokens_total",): 109,
        ("dflash:spec_decode_num_accepted_tokens_per_pos_total", "0"): 110,
        ("dflash:spec_decode_num_accepted_tokens_per_pos_total", "1"): 111,
    }


def test_histograms_have_the_buckets_of_the_table_in_their_own_unit():
    triton = FakeTriton()
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)
    metrics.observe_step({"verify": 0.1})
    metrics.flush()
    assert triton.buckets == {spec.name: list(spec.buckets) for spec in METRICS if spec.kind == "histogram"}
    seconds = {name: bounds for name, bounds in triton.buckets.items() if name.endswith("_seconds")}
    assert len(seconds) >= 5
    for name, bounds in seconds.items():
        assert bounds == sorted(set(bounds)), name
        assert bounds[0] <= 0.005, f"{name}: milliseconds tell a fast server from a slow one"
        assert 1.0 <= bounds[-1] <= 600.0, name
