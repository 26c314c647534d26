"""Every way a request can be wrong, and what the message says."""

import json

import pytest

from dflash_backend.frontend.request import ReturnFlags, parse_request
from dflash_backend.messages import EngineReady
from tests.frontend.conftest import START
from tests.frontend.fake_triton import as_input

READY = EngineReady(
    max_model_len=32, num_speculative_tokens=5, num_kv_blocks=8, kv_block_size=16, vocab_size=258, description=""
)


@pytest.fixture
def parse(tokenizer):
    def parse(parameters="{}", **inputs):
        arrays = {name: as_input(value) for name, value in inputs.items()}
        return parse_request(arrays, parameters, tokenizer, READY, max_n=4)

    return parse


def test_without_streaming_the_prompt_comes_before_the_answer(parse):
    assert parse(text_input="hé").prefix == "hé"
    assert parse(text_input="hé", exclude_input_in_output=True).prefix == ""
    assert parse(text_input="hé", stream=True).prefix == ""


def test_a_prompt_of_token_ids_is_put_before_the_answer_as_text(parse):
    parsed = parse(input_ids=list(b"abc"))
    assert (parsed.prompt_token_ids, parsed.prefix) == (list(b"abc"), "abc")


def test_messages_go_through_the_chat_template(parse):
    parsed = parse(messages=json.dumps([{"role": "u", "content": "hi"}]), stream=True)
    assert parsed.prompt_token_ids == [START, *b"u:hi", START, *b"a:"]


def test_the_sampling_input_wins_over_the_requests_parameters(parse):
    parsed = parse('{"max_tokens": 3, "nonsense": 1}', text_input="a", sampling_parameters='{"max_tokens": 5}')
    assert parsed.sampling.max_tokens == 5


def test_names_that_triton_adds_to_the_parameters_are_skipped(parse):
    parsed = parse(
        '{"id": "x", "triton_final": true, "sequence_id": 4, "timeout": 9, "max_tokens": "3"}', text_input="a"
    )
    assert parsed.sampling.max_tokens == 3


def test_outputs_are_returned_when_asked_for(parse):
    flags = parse(text_input="a", return_finish_reason=True, return_spec_stats=True, return_token_ids=False).returns
    assert flags == ReturnFlags(finish_reason=True, spec_stats=True)


def test_the_longest_prompt_leaves_room_for_one_token(parse):
    assert len(parse(text_input="a" * 31).prompt_token_ids) == 31


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "exactly one of the inputs text_input, input_ids, messages is needed; none was sent"),
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids were sent"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"text_input": "a" * 32}, "the prompt has 32 tokens .* max_model_len is 32"),
        ({"text_input": b"ab\xff"}, "'text_input' is not UTF-8 text: invalid start byte at byte 2"),
        ({"messages": b"\xc3"}, "'messages' is not UTF-8"),
        ({"sampling_parameters": b"\x80", "text_input": "a"}, "'sampling_parameters' is not UTF-8"),
        ({"input_ids": [1, 258]}, "has 258 at position 1; allowed: the target's token ids, 0 to 257"),
        ({"input_ids": [-1]}, "has -1 at position 0"),
        ({"input_ids": "abc"}, "'input_ids' has the type object; allowed: INT32 or INT64"),
        ({"messages": "{"}, "'messages' is not JSON"),
        ({"messages": "[]"}, "'messages' must be a JSON list"),
        ({"messages": '["hi"]'}, "message 0 must be an object with a 'role' and a 'content'"),
        ({"text_input": "a", "sampling_parameters": "{"}, "'sampling_parameters' is not JSON"),
        ({"text_input": "a", "sampling_parameters": "[1]"}, "'sampling_parameters' must be a JSON object"),
        ({"text_input": "a", "sampling_parameters": '{"top_q": 1}'}, "'top_q'; did you mean 'top_p'"),
        ({"text_input": "a", "sampling_parameters": '{"num_speculative_tokens": 6}'}, "an integer from 0 to 5"),
        ({"text_input": "a", "stream": True, "exclude_input_in_output": False}, "allowed with streaming: true"),
        ({"text_input": "a", "stream": "yes"}, "'stream' has the type object; allowed: BOOL"),
        ({"text_input": [1]}, "'text_input' has the type int64; allowed: STRING"),
        (
            {"text_input": "a", "sampling_parameters": '{"n": 5}'},
            "'n' has the value 5; allowed: .* 1 to 4",
        ),
        ({"text_input": "a", "sampling_parameters": '{"lora_name": "x"}'}, "this server has no LoRA adapters"),
        ({"text_input": "a", "sampling_parameters": '{"stop_token_ids": [258]}'}, "token ids from 0 to 257"),
        ({"text_input": "a", "sampling_parameters": '{"seed": NaN}'}, "NaN is no JSON number"),
        ({"text_input": "a", "sampling_parameters": '{"temperature": 1e999}'}, "'temperature' has the value inf"),
        ({"text_input": "a", "sampling_parameters": '{"seed": 1, "seed": 2}'}, "the key 'seed' comes twice"),
        ({"text_input": "a", "sampling_parameters": '{"seed": %s}' % ("9" * 5000)}, "a number has 5000 digits"),
        ({"text_input": "a", "sampling_parameters": '{"seed": "%s"}' % ("9" * 5000)}, r"9\.\.\. \(5002 characters\)"),
        ({"text_input": "a", "sampling_parameters": '{"seed": %s}' % ("[" * 500 + "]" * 500)}, "'seed' has the value"),
        ({"text_input": "a", "sampling_parameters": "[" * 100_000}, "'sampling_parameters' is nested too deeply"),
        ({"text_input": "a", "sampling_parameters": '{"stop": "\\ud800"}'}, "half a surrogate pair"),
        ({"text_input": "a", "sampling_parameters": '{"stop": "[\\"\\\\ud800\\"]"}'}, "'stop' has the value"),
        ({"text_input": "a", "sampling_parameters": " " * 4_000_001}, "has 4000001 characters; allowed: at most"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop": ["x"] * 65})}, "at most 64 strings"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop": "x" * 1025})}, "1 to 1024 characters"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"cache_salt": "x" * 1025})}, "at most 1024 characters"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop_token_ids": [1] * 1025})}, "at most 1024 token"),
        ({"text_input": "a" * 1000}, "the prompt has 1000 characters, but max_model_len is 32 tokens"),
        ({"messages": "[" * 900}, "'messages' is not JSON"),
        ({"messages": '[{"role": "u", "content": "\\udc00"}]'}, "half a surrogate pair"),
        ({"messages": " " * 5000}, "'messages' has 5000 characters; allowed"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(parse, inputs, message):
    with pytest.raises(ValueError, match=message):
        parse(**inputs)


def test_a_request_may_ask_for_as_many_completions_as_run_at_a_time(parse):
    assert parse('{"n": "4"}', text_input="a").sampling.n == 4


def test_a_name_for_no_adapter_is_let_pass(parse):
    assert parse('{"lora_name": null}', text_input="a").sampling.max_tokens == 16


def test_a_nul_in_a_prompt_is_a_character_like_others(parse):
    assert parse(text_input="a\0b").prompt_token_ids == [97, 0, 98]
