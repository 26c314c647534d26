"""Every way a request can be wrong, and what the message says."""

import itertools
import json
import re
import threading
import time

import msgspec
import numpy as np
import pytest

from checks.byte_tokenizer import START
from dflash_backend.messages import ENCODER, ENGINE_INPUT, EngineReady, GenerationRequest
from dflash_backend.text.request import InputError, RequestRules, ReturnFlags, parse_request
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.text.tokenizer import Tokenizer
from tests.triton.fake_triton import as_input

READY = EngineReady(
    max_model_len=32, num_speculative_tokens=5, num_kv_blocks=8, kv_block_size=16, vocab_size=258, description=""
)
RULES = RequestRules(4)


@pytest.fixture
def parse(tokenizer):
    def parse(parameters="{}", rules=RULES, max_model_len=32, vocab_size=258, **inputs):
        ready = msgspec.structs.replace(READY, max_model_len=max_model_len, vocab_size=vocab_size)
        arrays = {name: as_input(value) for name, value in inputs.items()}
        return parse_request(arrays, parameters, tokenizer, ready, rules)

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


def test_the_longest_prompt_leaves_space_for_one_token(parse):
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
        (
            {"text_input": "a", "stream": True, "exclude_input_in_output": False},
            r"When streaming, `exclude_input_in_output` = False is not allowed\.",
        ),
        ({"text_input": "a", "stream": "yes"}, "'stream' has the type object; allowed: BOOL"),
        ({"text_input": [1]}, "'text_input' has the type int64; allowed: STRING"),
        (
            {"text_input": "a", "sampling_parameters": '{"n": 5}'},
            "'n' has the value 5; allowed: .* 1 to 4",
        ),
        ({"text_input": "a", "sampling_parameters": '{"lora_name": "x"}'}, r"^LoRA feature is not enabled\.$"),
        ({"text_input": "a", "sampling_parameters": '{"stop_token_ids": [258]}'}, "token ids from 0 to 257"),
        ({"text_input": "a", "sampling_parameters": '{"seed": NaN}'}, "NaN is no JSON number"),
        ({"text_input": "a", "sampling_parameters": '{"temperature": 1e999}'}, "'temperature' has the value inf"),
        ({"text_input": "a", "sampling_parameters": '{"seed": 1, "seed": 2}'}, "the key 'seed' comes twice"),
        ({"text_input": "a", "sampling_parameters": '{"seed": %s}' % ("9" * 5000)}, "a number has 5000 digits"),
        ({"text_input": "a", "sampling_parameters": '{"seed": "%s"}' % ("9" * 5000)}, r"9\.\.\. \(5000 characters\)"),
        (
            {"text_input": "a", "sampling_parameters": '{"seed": %s}' % ("[" * 500 + "]" * 500)},
            "nested too deeply; allowed: 16",
        ),
        ({"text_input": "a", "sampling_parameters": '{"seed": [[[]]]}'}, "'seed' has the value"),
        ({"text_input": "a", "sampling_parameters": "[" * 60_000}, "is nested too deeply or has too many parts"),
        ({"text_input": "a", "sampling_parameters": '{"stop": "\\ud800"}'}, "half a surrogate pair"),
        ({"text_input": "a", "sampling_parameters": '{"stop": ["\\ud800"]}'}, "half a surrogate pair"),
        ({"text_input": "a", "sampling_parameters": '{"stop": "[\\"\\\\ud800\\"]"}'}, "'stop' has the value"),
        ({"text_input": "a", "sampling_parameters": " " * 71_729}, "has 71729 characters; allowed: at most 71728"),
        ({"text_input": "a", "sampling_parameters": " " * 400_000}, "has 400000 bytes; allowed: at most"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop": ["x"] * 65})}, "at most 64 strings"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop": "x" * 1025})}, "1 to 1024 characters"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"cache_salt": "x" * 1025})}, "at most 1024 characters"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop_token_ids": [1] * 1025})}, "at most 1024 token"),
        ({"text_input": "a" * 1000}, "the prompt has 1000 bytes, but max_model_len is 32 tokens, .* at most 128 char"),
        ({"text_input": "\u00e9" * 170}, "the prompt has 170 characters, but max_model_len is 32 tokens"),
        ({"input_ids": [300] * 40}, "the prompt has 40 tokens and the answer needs at least 1"),
        ({"messages": "[" * 900}, "'messages' is not JSON"),
        ({"messages": '[{"role": "u", "content": "\\udc00"}]'}, "half a surrogate pair"),
        ({"messages": " " * 70_000}, "'messages' has 70000 characters; allowed: at most 67584"),
        ({"messages": json.dumps([{"role": "u", "content": [[]] * 6000}])}, "6003 brackets; allowed: 5008"),
        ({"text_input": "a", "sampling_parameters": json.dumps({"stop": [{}] * 6000})}, "6002 brackets; allowed: 5000"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(parse, inputs, message):
    with pytest.raises(ValueError, match=message):
        parse(**inputs)


def test_a_request_may_ask_for_as_many_completions_as_run_at_a_time(parse):
    assert parse('{"n": "4"}', text_input="a").sampling.n == 4


@pytest.mark.parametrize(
    "inputs", [{"text_input": "ab\xff"}, {"messages": json.dumps([{"role": "u", "content": "b\xff"}])}]
)
def test_a_token_that_the_tokenizer_alone_has_is_refused(parse, inputs):
    """A step that looks it up would fail, on a GPU with all other requests."""
    assert parse(vocab_size=258, **inputs).prompt_token_ids
    with pytest.raises(
        InputError, match=r"the prompt has the token \d+ of the tokenizer, which the target does not know"
    ):
        parse(vocab_size=190, **inputs)


def test_a_name_for_no_adapter_is_let_pass(parse):
    assert parse('{"lora_name": null}', text_input="a").sampling.lora_name == ""
    assert parse('{"lora_name": ""}', text_input="a").sampling.max_tokens == 16


def test_an_adapter_is_one_of_the_engines(tokenizer):
    ready = msgspec.structs.replace(READY, lora_names=("doll", "sheep"))
    arrays = {"text_input": as_input("a")}
    assert parse_request(arrays, '{"lora_name": "sheep"}', tokenizer, ready, RULES).sampling.lora_name == "sheep"
    with pytest.raises(InputError, match=r"^LoRA 'goat' is not supported, we currently support \['doll', 'sheep'\]$"):
        parse_request(arrays, '{"lora_name": "goat"}', tokenizer, ready, RULES)
    with pytest.raises(ParameterError, match="'lora_name' has the value 3; allowed: the name of a LoRA adapter"):
        parse_request(arrays, '{"lora_name": 3}', tokenizer, ready, RULES)


def test_a_nul_in_a_prompt_is_a_character_like_others(parse):
    assert parse(text_input="a\0b").prompt_token_ids == [97, 0, 98]


# Settings that ask something of requests, and options of the chat template


def test_a_server_may_require_a_salt(parse):
    rules = RequestRules(4, require_cache_salt=True)
    assert parse('{"cache_salt": "mine"}', rules, text_input="a").sampling.cache_salt == "mine"
    for parameters in ("{}", '{"cache_salt": ""}', '{"cache_salt": null}'):
        with pytest.raises(InputError, match="'cache_salt' is missing; this server requires one"):
            parse(parameters, rules, text_input="a")


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (0.6, 20, 64)),
        ({"temperature": 0}, (0.0, 20, 64)),
        ({"top_k": None}, (0.6, 20, 64)),
        # As many as fit after a prompt of one token.
        ({"max_tokens": None}, (0.6, 20, 31)),
    ],
)
def test_defaults_of_the_checkpoint_hold_for_what_a_request_leaves_out(parse, parameters, expected):
    rules = RequestRules(4, sampling_defaults={"temperature": 0.6, "top_k": 20, "max_tokens": 64})
    sampling = parse(json.dumps(parameters), rules, text_input="a").sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == expected


@pytest.mark.parametrize("sent", ["text_input", "input_ids"])
@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": "3", "truncation_side": "left"}, "fgh"),
        ({"truncate_prompt_tokens": 3.0, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 31}, "abcdefgh"),
        ({"truncate_prompt_tokens": None, "truncation_side": "right"}, "abcdefgh"),
    ],
)
def test_a_prompt_is_cut_to_so_many_tokens_at_one_end(parse, sent, parameters, kept):
    prompt = "abcdefgh" if sent == "text_input" else list(b"abcdefgh")
    parsed = parse(json.dumps(parameters), **{sent: prompt})
    assert bytes(parsed.prompt_token_ids).decode() == parsed.prefix == kept
    assert parse(json.dumps(parameters), **{sent: prompt}, exclude_input_in_output=True).prefix == ""


@pytest.mark.parametrize(
    ("answer", "num_kept"), [({"max_tokens": 7}, 25), ({"max_tokens": "7"}, 25), ({"max_tokens": None}, 31), ({}, 31)]
)
def test_a_prompt_is_cut_to_what_fits_beside_the_answer(parse, answer, num_kept):
    """However long it is: of 32 positions the answer has as many as it asks for, or one."""
    parameters = json.dumps({"truncate_prompt_tokens": -1, **answer})
    long = b"a" * 40 + b"b" * 10
    for inputs in ({"text_input": long.decode()}, {"input_ids": list(long)}):
        parsed = parse(parameters, **inputs)
        assert bytes(parsed.prompt_token_ids) == long[-num_kept:]
    # Messages too, however many.
    messages = json.dumps([{"role": "u", "content": "x"}] * 17)
    assert (
        parse(parameters, messages=messages).prompt_token_ids == ([START, *b"u:x"] * 17 + [START, *b"a:"])[-num_kept:]
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"truncate_prompt_tokens": 0},
            "'truncate_prompt_tokens' has the value 0; allowed: an integer from 1 to 31, or",
        ),
        ({"truncate_prompt_tokens": 32}, "has the value 32; allowed"),
        ({"truncate_prompt_tokens": -2}, "has the value -2; allowed"),
        ({"truncate_prompt_tokens": "x"}, "has the value 'x'; allowed"),
        ({"truncate_prompt_tokens": True}, "has the value True; allowed"),
        (
            {"truncation_side": "up"},
            "'truncation_side' has the value 'up'; allowed: left, which keeps the end, or right",
        ),
        ({"truncation_side": []}, "'truncation_side' has the value []"),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused(parse, parameters, words):
    with pytest.raises(ParameterError, match=re.escape(words)):
        parse(json.dumps(parameters), text_input="abc")


def test_a_text_that_is_cut_may_be_no_longer_than_any_prompt(parse):
    with pytest.raises(
        InputError, match="the prompt has 129 characters, but max_model_len is 32 tokens, for which at most 128"
    ):
        parse('{"truncate_prompt_tokens": 3}', text_input="a" * 129)
    # Another that a request was cut to is no parameter of the engine's.
    assert parse('{"truncate_prompt_tokens": 3}', text_input="abc").sampling == parse(text_input="abc").sampling


@pytest.mark.parametrize(
    "parameters", [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_thinking_can_be_switched_off(parse, tokenizer, monkeypatch, parameters, as_text):
    template = "{% if enable_thinking is false %}off{% else %}on{% endif %}"
    monkeypatch.setattr(tokenizer._template, "chat_template", template)
    messages = json.dumps([{"role": "u", "content": "hi"}])
    if as_text:
        parameters = {name: json.dumps(value) for name, value in parameters.items()}
    assert parse(messages=messages).prefix == "on"
    assert parse(json.dumps(parameters), messages=messages).prefix == "off"
    assert parse(messages=messages, sampling_parameters=json.dumps(parameters)).prefix == "off"


def test_options_of_the_template_are_for_messages(parse):
    with pytest.raises(InputError, match="'chat_template_kwargs' is for the chat template of the input 'messages'"):
        parse('{"enable_thinking": false}', text_input="a")


@pytest.mark.parametrize("name", ["image", "embedding_request"])
def test_inputs_of_the_vllm_backend_that_nothing_here_reads_are_refused_by_name(parse, name):
    with pytest.raises(InputError, match=f"input '{name}' is not supported: this server"):
        parse(text_input="a", **{name: "x"})


# What would be expensive to read is refused before it is read: the readers below fail the test when they are called.


@pytest.fixture
def no_reader(monkeypatch):
    """Neither JSON nor UTF-8 of a client's text is read, and nothing is tokenised."""

    def fail(text, *args, **kwargs):
        assert text == "{}", "the text was read before it was measured"
        return {}

    monkeypatch.setattr(json, "loads", fail)
    monkeypatch.setattr(Tokenizer, "_encode", fail)


BIG = {
    "nested 900 deep": '{"triton_x": [' + ",".join(["[" * 900 + "]" * 900] * 200) + "]}",
    "an unknown name of megabytes": json.dumps({"x" * 3_900_000: 1}),
    "biases of no token": json.dumps({"logit_bias": {f"{number:07d}": 1 for number in range(100_000)}}),
    "stop token ids": json.dumps({"stop_token_ids": [1] * 200_000}),
    "empty objects": '{"triton_x": [' + "{}," * 200_000 + "{}]}",
    "integers of a grammar": '{"structured_outputs": {"json": {"enum": [' + "1," * 100_000 + "1]}}}",
}


@pytest.mark.parametrize("text", BIG.values(), ids=BIG)
@pytest.mark.parametrize("place", ["as an input", "as request parameters"])
def test_sampling_parameters_are_measured_before_they_are_read(parse, no_reader, text, place):
    sent = {"sampling_parameters": text} if place == "as an input" else {}
    with pytest.raises(InputError, match="allowed: "):
        parse("{}" if sent else text, text_input="a", **sent)


@pytest.mark.parametrize(
    "inputs",
    [
        {"text_input": b"\xff" * 1_000_000},
        {"messages": b"\xff" * 1_000_000},
        {"messages": '[{"role": "u", "content": "a", "x": [' + "{}," * 10_000 + "{}]}]"},
        {"messages": '[{"role": "u", "content": "a", "x": [' + "1," * 10_000 + "1]}]"},
        {"sampling_parameters": '{"structured_outputs": {"json": {"enum": [' + "1," * 60_000 + "1]}}}"},
    ],
)
def test_prompts_are_measured_before_they_are_read(parse, no_reader, inputs):
    with pytest.raises(InputError, match=r"max_model_len|allowed: "):
        parse(**inputs)


@pytest.mark.parametrize("place", ["as an input", "as request parameters"])
def test_a_text_that_is_too_long_is_not_searched_for_a_grammar(parse, no_reader, monkeypatch, place):
    monkeypatch.setattr(msgspec.json, "decode", lambda *args, **kwargs: pytest.fail("it was searched"))
    text = json.dumps({"structured_outputs": {"regex": "a"}, "x": "x" * 700_000})
    sent = {"sampling_parameters": text} if place == "as an input" else {}
    with pytest.raises(InputError, match="has 700047 characters; allowed: at most 596016"):
        parse("{}" if sent else text, text_input="a", **sent)


def test_a_text_in_messages_may_have_any_number_of_commas_and_brackets(parse):
    messages = [{"role": "u", "content": "a", "x": '",[{\\' * 6000}]
    assert parse(messages=json.dumps(messages)).prefix == "<s>u:a<s>a:"


class _UnreadableArray(np.ndarray):
    def tolist(self):
        raise AssertionError("the ids were converted before they were checked")


@pytest.mark.parametrize(
    ("ids", "message"), [([300] * 40, "has 40 tokens"), ([1, 2, 999], "has 999 at position 2"), ([-1], "has -1 at")]
)
def test_token_ids_are_checked_as_an_array(parse, ids, message):
    array = np.array(ids, dtype=np.int64).view(_UnreadableArray)
    with pytest.raises(InputError, match=message):
        parse(input_ids=array)


def test_a_bias_for_every_token_of_a_large_vocabulary_fits(parse):
    biases = json.dumps({"logit_bias": {str(token_id): -99.75 for token_id in range(152_000)}})
    parsed = parse(vocab_size=152_000, text_input="a", sampling_parameters=biases)
    assert len(parsed.sampling.logit_bias) == 152_000


# Of such a vocabulary a whole logit bias is longer than other parameters may be.
VOCABULARY = 20_000
BIASES = {str(token_id): 0.5 for token_id in range(VOCABULARY)}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("as_parameters", [False, True])
def test_a_long_bias_is_read_with_what_is_around_it(parse, nested, as_parameters):
    biases = {**BIASES, "7": -1e9, "8": 3}
    values = {"seed": 5, "logit_bias": json.dumps(biases) if nested else biases, "stop": ["logit_bias", "\u00e9{:"]}
    text = json.dumps(values)
    sent = {"parameters": text} if as_parameters else {"sampling_parameters": text}
    sampling = parse(vocab_size=VOCABULARY, text_input="a", **sent).sampling
    assert (sampling.seed, sampling.stop) == (5, ("logit_bias", "\u00e9{:"))
    assert sampling.logit_bias == {int(name): 0.5 for name in BIASES} | {7: -100.0, 8: 3.0}
    assert ENGINE_INPUT.decode(ENCODER.encode(GenerationRequest("a", [1], sampling))).sampling == sampling


def long_bias(**changes):
    return json.dumps({"logit_bias": {**BIASES, **changes}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (long_bias(**{"20001": 1}), "has a logit_bias of 20001 entries; allowed: at most 20000"),
        (json.dumps({"logit_bias": dict(list(BIASES.items())[1:]) | {"20000": 1}}), "so not 20000"),
        (json.dumps({"logit_bias": dict(list(BIASES.items())[1:]) | {"-1": 1}}), "so not -1"),
        (long_bias(**{"7": "much"}), "no object from token ids to numbers"),
        (long_bias(**{"7": None}), "no object from token ids to numbers"),
        (json.dumps({"logit_bias": dict(list(BIASES.items())[1:]) | {"07": 1}}), "no object from token ids to numbers"),
        (long_bias().replace('"19999"', '"19998"'), "a logit_bias in which a token comes twice"),
        (long_bias()[:-1] + ', "seed": 1, "seed": 2}', "the key 'seed' comes twice"),
        (long_bias()[:-1] + "," + long_bias()[1:], "colons; allowed: at most|besides 'logit_bias'|has .* characters"),
        (long_bias()[:-1] + ', "x": ' + json.dumps("y" * 70_000) + "}", "characters; allowed: at most 65536"),
        (json.dumps({"seed": "9" * 70_000}), "allowed: at most 65536 besides 'logit_bias'"),
        (long_bias()[:-1], "is no JSON object of parameters"),
        ("[" + long_bias() + "]", "is no JSON object of parameters"),
        (json.dumps({"logit_bias": [0.5] * 30_000}), "no object from token ids to numbers"),
        (json.dumps({"logit_bias": "x" * 70_000}), "no object from token ids to numbers"),
        ('{"logit_bias": ' + "[" * 70_000, "is no JSON object of parameters|nested"),
        (json.dumps({f"triton_{n}": 1 for n in range(9000)}), "besides 'logit_bias'"),
    ],
)
def test_a_long_text_that_is_wrong_is_refused_with_a_sentence(parse, text, message):
    assert len(text) > 65_536
    with pytest.raises(ValueError, match=message):
        parse(vocab_size=VOCABULARY, text_input="a", sampling_parameters=text)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "u", "content": [""] * 15_000}], "too many parts: 30006 quotation marks; allowed: 20128"),
        ([{"role": "u", "content": "a"}] * 17, "has 17 messages, which are too many tokens: max_model_len is 32"),
    ],
)
def test_messages_are_counted_before_the_template_runs(parse, messages, message):
    with pytest.raises(InputError, match=message):
        parse(messages=json.dumps(messages))


def test_a_text_is_tokenised_no_further_than_it_takes_to_refuse_it(parse, tokenizer, monkeypatch):
    tokenised = []
    encode = Tokenizer._encode

    def counting(self, texts, add_special_tokens):
        tokenised.extend(map(len, texts))
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode", counting)
    monkeypatch.setattr(tokenizer, "max_token_chars", 20)
    with pytest.raises(InputError, match="has 10000 characters, which are too many tokens: max_model_len is 2048"):
        parse(max_model_len=2048, text_input="a" * 10_000)
    assert 0 < sum(tokenised) < 9000


def test_a_long_text_of_long_tokens_is_not_refused_for_its_length(parse, tokenizer, monkeypatch):
    monkeypatch.setattr("dflash_backend.text.tokenizer.PIECE_CHARS_PER_TOKEN", 1)
    text = "</s>" * 1990 + "<s>" * 9
    assert not tokenizer.has_more_tokens(text, 1999)
    assert len(parse(max_model_len=2000, text_input=text).prompt_token_ids) == 1999


def test_tokenising_lets_other_threads_run(tokenizer):
    """The thread that answers everybody shares the interpreter with the one that tokenises."""
    ticks: list[float] = []
    done = threading.Event()

    def tick():
        while not done.wait(0.0005):
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    began = time.perf_counter()
    tokenizer.encode("word " * 200_000)
    ended = time.perf_counter()
    done.set()
    other.join()
    meanwhile = [began, *(at for at in ticks if began < at < ended), ended]
    longest_pause = max(after - before for before, after in itertools.pairwise(meanwhile))
    assert longest_pause < 0.5 * (ended - began)


def test_a_final_message_is_continued(parse):
    messages = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}])
    assert parse('{"continue_final_message": true}', messages=messages).prefix.endswith("assistant:Well,")
    with pytest.raises(InputError, match="'continue_final_message' is for the chat template of the input 'messages'"):
        parse('{"continue_final_message": true}', text_input="a")
