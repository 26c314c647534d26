"""What reaches Triton's metrics page."""

import math

import pytest

from dflash_backend.messages import AdaptiveSpeculationStats, EngineStats, GrammarStats, TierStats, TransferStats
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.triton.metric_specs import CACHE_CONFIG, METRICS
from dflash_backend.triton.metrics import Metrics, engine_names
from tests.triton.fake_triton import FakeTriton


@pytest.fixture(params=["Triton's own histograms", "an old Triton"])
def triton(request):
    return FakeTriton(native_histograms=request.param != "an old Triton")


@pytest.fixture
def metrics(triton):
    return Metrics(triton, "m", "m_0_0", triton.lines.append)


def test_counters_follow_the_engine_by_what_was_added(triton, metrics):
    for drafts in (3, 3, 10):
        metrics.follow(EngineStats(spec_decoding=SpecDecodingStats(drafts, 0, 0, [drafts, 1]), kv_cache_usage=0.5))
        metrics.flush()
    assert triton.values["dflash:spec_decode_num_drafts_total",] == 10
    assert triton.values["dflash:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 10
    assert triton.values["dflash:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert triton.values["dflash:kv_cache_usage_perc", "m_0_0"] == 0.5


def test_every_metric_without_further_labels_is_there_from_the_start(triton, metrics):
    assert triton.values["dflash:num_preemptions_total",] == 0
    assert ("dflash:e2e_request_latency_seconds_count",) in triton.values
    assert set(triton.buckets("dflash:request_params_n")) == {"1", "2", "5", "10", "20", "50", "+Inf"}


def test_a_histogram_is_counters_of_what_is_not_above_each_bound(triton, metrics):
    metrics.observe("dflash:request_params_n", 2)
    metrics.observe("dflash:request_params_n", 7, times=3)
    metrics.flush()
    metrics.observe("dflash:request_params_n", 64)
    metrics.flush()
    assert triton.observed("dflash:request_params_n") == (5, 2 + 3 * 7 + 64)
    assert triton.buckets("dflash:request_params_n") == {
        "1": 0, "2": 1, "5": 1, "10": 4, "20": 4, "50": 4, "+Inf": 5
    }  # fmt: skip


def test_every_bucket_of_a_histogram_by_label_is_there_with_its_first_observation(triton, metrics):
    metrics.observe_step({"verify": 0.03})
    metrics.flush()
    buckets = {
        key[2]: value for key, value in triton.values.items() if key[:2] == ("dflash:step_seconds_bucket", "verify")
    }
    assert (buckets["0.025"], buckets["0.05"], buckets["+Inf"]) == (0, 1, 1)
    assert len(buckets) == 14


def test_what_concerns_requests_is_handed_over_without_the_metrics_of_steps(triton, metrics):
    metrics.observe_step({"verify": 0.03})
    metrics.observe("dflash:request_params_n", 2)
    metrics.observe("dflash:inter_token_latency_seconds", 0.02)
    metrics.set("dflash:num_requests_in_flight", 3.0)
    metrics.follow(EngineStats(spec_decoding=SpecDecodingStats(3, 0, 0, [3, 1])))
    metrics.flush_requests()
    of_steps = ("dflash:step_seconds_count", "verify"), ("dflash:spec_decode_num_accepted_tokens_per_pos_total", "0")
    assert [key in triton.values for key in of_steps] == [False, False]
    assert triton.observed("dflash:request_params_n") == (1, 2)
    assert triton.observed("dflash:inter_token_latency_seconds")[0] == 0
    assert triton.values["dflash:num_requests_in_flight", "m_0_0"] == 3
    assert triton.values["dflash:spec_decode_num_drafts_total",] == 3
    metrics.flush()
    assert [triton.values[key] for key in of_steps] == [1, 3]
    assert triton.observed("dflash:inter_token_latency_seconds") == (1, 0.02)


def test_one_request_costs_one_observation_a_histogram_where_triton_has_histograms(triton, metrics):
    native = hasattr(triton.MetricFamily, "HISTOGRAM")
    for spec in METRICS:
        if spec.per_request:
            metrics.observe(spec.name, 0.02)
    metrics.flush_requests()
    assert triton.observations == [spec.name for spec in METRICS if spec.per_request] * native
    assert all(triton.observed(spec.name) == (1, 0.02) for spec in METRICS if spec.per_request)


def test_observations_that_triton_does_not_take_wait_for_the_next_time(triton, metrics):
    metrics.observe("dflash:request_params_n", 2)
    triton.metrics_fail = True
    metrics.flush_requests()
    assert triton.observed("dflash:request_params_n") == (0, 0)
    triton.metrics_fail = False
    metrics.flush_requests()
    assert triton.observed("dflash:request_params_n") == (1, 2)


def test_every_metric_has_the_models_name_and_version(triton):
    Metrics(triton, "m", "m_0_0", triton.lines.append, version="3")
    assert {(labels["model"], labels["version"]) for labels in triton.labels} == {("m", "3")}


def test_metrics_that_are_switched_off_reach_no_page(triton):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, enabled=False)
    metrics.count("dflash:engine_restarts_total")
    metrics.observe_step({"verify": 0.03})
    metrics.set("dflash:engine_ready", 1.0)
    metrics.flush()
    assert not triton.values


def test_an_engine_that_is_gone_leaves_the_services_gauges_alone(triton, metrics):
    metrics.follow(EngineStats(num_requests_running=4))
    metrics.set("dflash:stub_heartbeat_timestamp_seconds", 1.7e9)
    metrics.reset_engine()
    metrics.flush()
    assert triton.values["dflash:num_requests_running", "m_0_0"] == 0
    assert triton.values["dflash:stub_heartbeat_timestamp_seconds", "m_0_0"] == 1.7e9


def test_every_figure_of_the_engine_reaches_the_metric_that_is_named_after_it(triton, metrics):
    """Each figure is another number, so that two that change places are noticed."""
    stats = EngineStats(
        num_requests_running=101,
        num_requests_waiting=102,
        kv_cache_usage=0.103,
        num_preemptions=104,
        prefix_cache_queries=105,
        prefix_cache_hits=106,
        spec_decoding=SpecDecodingStats(107, 108, 109, [110, 111]),
        speculation=AdaptiveSpeculationStats(112, 113, [114, 115], [116.5, 117.5], 118, 119, 1.2),
        lookup=SpecDecodingStats(120, 121, 122, []),
        grammars=GrammarStats(131, 132, 133.5, 134, 135.5),
        kept=TransferStats(161, 162, 163),
        tiers={"host": TierStats(141, 142, 143.5, 144, 145.5, 146, 147), "disk": TierStats(num_hit_tokens=151)},
    )
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
        ("dflash:spec_decode_num_steps_total",): 112,
        ("dflash:spec_decode_num_steps_without_drafts_total",): 113,
        ("dflash:spec_decode_num_proposed_tokens_total",): 118,
        ("dflash:spec_decode_num_budgeted_steps_total",): 119,
        ("dflash:spec_decode_num_lookup_draft_tokens_total",): 121,
        ("dflash:spec_decode_num_lookup_accepted_tokens_total",): 122,
        ("dflash:spec_decode_confidence_weight", "m_0_0"): 1.2,
        ("dflash:spec_decode_num_draft_tokens_per_pos_total", "0"): 114,
        ("dflash:spec_decode_num_draft_tokens_per_pos_total", "1"): 115,
        ("dflash:spec_decode_num_expected_tokens_per_pos_total", "0"): 116.5,
        ("dflash:spec_decode_num_expected_tokens_per_pos_total", "1"): 117.5,
        ("dflash:grammar_requests_total",): 131,
        ("dflash:grammars_compiled_total",): 132,
        ("dflash:grammar_compile_seconds_total",): 133.5,
        ("dflash:grammar_steps_total",): 134,
        ("dflash:grammar_mask_seconds_total",): 135.5,
        ("dflash:kv_tier_hit_tokens_total", "host"): 141,
        ("dflash:kv_tier_stored_bytes_total", "host"): 142,
        ("dflash:kv_tier_stored_seconds_total", "host"): 143.5,
        ("dflash:kv_tier_loaded_bytes_total", "host"): 144,
        ("dflash:kv_tier_loaded_seconds_total", "host"): 145.5,
        ("dflash:kv_tier_lost_total", "host"): 146,
        ("dflash:kv_tier_computed_total", "host"): 147,
        ("dflash:kv_tier_hit_tokens_total", "disk"): 151,
        ("dflash:kv_kept_prompts_total",): 161,
        ("dflash:kv_fetched_prompts_total",): 162,
        ("dflash:kv_given_up_prompts_total",): 163,
    }


def test_histograms_have_the_buckets_of_the_table_in_their_own_unit(triton, metrics):
    metrics.observe_step({"verify": 0.1})
    metrics.flush()
    shown = {spec.name: triton.bounds(spec.name) for spec in METRICS if spec.kind == "histogram"}
    assert shown == {spec.name: [*spec.buckets, math.inf] for spec in METRICS if spec.kind == "histogram"}
    seconds = {name: bounds[:-1] for name, bounds in shown.items() if name.endswith("_seconds")}
    assert len(seconds) >= 5
    for name, bounds in seconds.items():
        assert bounds == sorted(set(bounds)), name
        assert bounds[0] <= 0.005, f"{name}: milliseconds tell a fast server from a slow one"
        assert 1.0 <= bounds[-1] <= 600.0, name


def test_metrics_that_the_vllm_backend_has_are_there_under_its_names_where_its_parameter_asks_for_them(triton):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, vllm_names=True)
    metrics.count("dflash:prompt_tokens_total", 18)
    metrics.observe("dflash:inter_token_latency_seconds", 0.02, times=15)
    metrics.observe("dflash:request_params_n", 2)
    metrics.flush()
    metrics.count("dflash:prompt_tokens_total", 3)
    metrics.flush()
    assert triton.values["vllm:prompt_tokens_total",] == triton.values["dflash:prompt_tokens_total",] == 21
    assert triton.observed("vllm:time_per_output_token_seconds") == (15, 15 * 0.02)
    assert triton.buckets("vllm:time_per_output_token_seconds")["0.025"] == 15
    assert triton.observed("vllm:request_params_n") == (1, 2)
    assert set(triton.buckets("vllm:request_params_n")) == set(triton.buckets("dflash:request_params_n"))


# vLLM's own names, as its documentation lists them, and what an observation or a count of ours becomes there.
OF_VLLM = {
    "dflash:prompt_tokens_total": "vllm:prompt_tokens_total",
    "dflash:generation_tokens_total": "vllm:generation_tokens_total",
    "dflash:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "dflash:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "dflash:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "dflash:request_prompt_tokens": "vllm:request_prompt_tokens",
    "dflash:request_generation_tokens": "vllm:request_generation_tokens",
    "dflash:request_params_n": "vllm:request_params_n",
}


def test_each_of_vllms_names_has_the_value_of_what_counts_the_same(triton):
    """Each is another number; the engine's own counters are in the next one."""
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, vllm_names=True)
    for number, name in enumerate(OF_VLLM, 3):
        (metrics.count if name.endswith("_total") else metrics.observe)(name, number)
    metrics.flush()
    for number, name in enumerate(OF_VLLM.values(), 3):
        if name.endswith("_total"):
            assert triton.values[name,] == number
        else:
            assert triton.observed(name) == (1, number)


def test_what_vllms_benchmark_computes_its_acceptance_from_is_there_under_vllms_names(triton):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, vllm_names=True)
    drafted = SpecDecodingStats(5, 10, 7, [4, 3])
    stats = EngineStats(spec_decoding=drafted, prefix_cache_queries=30, prefix_cache_hits=16, num_preemptions=2)
    metrics.follow(stats)
    metrics.flush()
    assert triton.values["vllm:spec_decode_num_drafts_total",] == 5
    assert triton.values["vllm:spec_decode_num_draft_tokens_total",] == 10
    assert triton.values["vllm:spec_decode_num_accepted_tokens_total",] == 7
    of_positions = [triton.values["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(p)] for p in range(2)]
    assert of_positions == [4, 3]
    assert triton.values["vllm:prefix_cache_queries_total",] == 30
    assert triton.values["vllm:prefix_cache_hits_total",] == 16
    assert triton.values["vllm:num_preemptions_total",] == 2


@pytest.mark.parametrize("vllm_names", [False, True])
def test_intervals_of_tokens_wait_for_the_whole_page_unless_a_client_of_vllm_may_look_for_them(triton, vllm_names):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, vllm_names=vllm_names)
    metrics.observe("dflash:inter_token_latency_seconds", 0.02, times=15)
    metrics.flush_requests()
    assert triton.observed("dflash:inter_token_latency_seconds")[0] == (15 if vllm_names else 0)
    metrics.flush()
    assert triton.observed("dflash:inter_token_latency_seconds")[0] == 15


def test_without_it_there_is_one_name_for_each_metric(triton, metrics):
    assert not [key for key in triton.values if key[0].startswith("vllm:")]


def test_what_triton_did_not_take_under_one_name_is_not_counted_twice_under_the_other(triton):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, vllm_names=True)
    metrics.count("dflash:generation_tokens_total", 5)
    triton.metrics_fail = True
    metrics.flush()
    triton.metrics_fail = False
    metrics.count("dflash:generation_tokens_total", 1)
    metrics.flush()
    assert triton.values["dflash:generation_tokens_total",] == triton.values["vllm:generation_tokens_total",] == 6


@pytest.mark.parametrize("vllm_names", [False, True])
def test_gauges_that_routers_read_are_those_of_all_engines_under_vllms_names(triton, vllm_names):
    engines = engine_names("m_0_0", 2)
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, vllm_names=vllm_names, engines=engines)
    metrics.inform(CACHE_CONFIG, ("16", "2400"))
    for index in range(2):
        stats = EngineStats(num_requests_running=3 + index, num_requests_waiting=5, kv_cache_usage=0.25 + index / 2)
        metrics.follow(stats, index)
    metrics.flush()
    assert triton.values["dflash:num_requests_running", "m_0_0-1"] == 4
    assert triton.values["dflash:cache_config_info", "m_0_0", "16", "2400"] == 1
    found = {key: value for key, value in triton.values.items() if key[0].startswith("vllm:") and key[1:]}
    of_vllm = {key: value for key, value in found.items() if key[1] == "m_0_0"}
    if not vllm_names:
        assert not found
        return
    assert of_vllm == {
        ("vllm:num_requests_running", "m_0_0"): 7,
        ("vllm:num_requests_waiting", "m_0_0"): 10,
        ("vllm:kv_cache_usage_perc", "m_0_0"): 0.5,
        ("vllm:cache_config_info", "m_0_0", "16", "2400"): 1,
    }
    metrics.reset_engine(0)
    metrics.flush()
    assert triton.values["vllm:num_requests_running", "m_0_0"] == 4


def test_what_an_engine_has_now_takes_the_place_of_what_it_had(triton, monkeypatch):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)
    made = []
    make = triton.MetricFamily.Metric

    def metric(*arguments, **options):
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(triton.MetricFamily, "Metric", metric)
    for blocks in ("2400", "1200"):
        metrics.inform(CACHE_CONFIG, ("16", blocks))
    assert triton.values["dflash:cache_config_info", "m_0_0", "16", "1200"] == 1
    held = [each for each in made if any(each is one for one in metrics._metrics.values())]
    assert held == made[1:], "Triton takes off its page what is no longer referred to"


def test_a_page_that_triton_does_not_take_ends_nothing(triton, monkeypatch):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)

    def refuse(*arguments, **options):
        raise RuntimeError("no shared memory")

    monkeypatch.setattr(triton.MetricFamily, "Metric", refuse)
    metrics.inform(CACHE_CONFIG, ("16", "2400"))
    assert triton.lines == ["metrics could not be handed to Triton: no shared memory"]


def test_counters_go_on_when_one_of_several_engines_starts_anew(triton):
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append, engines=engine_names("m_0_0", 2))
    for index in range(2):
        metrics.follow(EngineStats(num_preemptions=5), index)
    metrics.reset_engine(1)
    metrics.follow(EngineStats(num_preemptions=2), 1)
    metrics.follow(EngineStats(num_preemptions=6), 0)
    metrics.flush()
    assert triton.values["dflash:num_preemptions_total",] == 5 + 5 + 2 + 1
