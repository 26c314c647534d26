"""What reaches Triton's metrics page."""

from dflash_backend.frontend.metrics import Metrics
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
