"""Every bad request gets a sentence and a status; the server stays up and loses no other request."""

from __future__ import annotations

import json

import pytest

from dflash_client.errors import InvalidArgument
from tests.server.raw_grpc import infer, tensor


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of the inputs"),
        ({"text_input": "a", "messages": "[]"}, "text_input and messages were sent"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"text_input": "word " * 2000}, "max_model_len is 1024"),
        ({"input_ids": [5, 100000]}, "has 100000 at position 1"),
        ({"text_input": "a", "max_token": 5}, "did you mean 'max_tokens'"),
        ({"text_input": "a", "temperature": -1}, "'temperature' has the value -1"),
        ({"text_input": "a", "num_speculative_tokens": 16}, "an integer from 0 to 15"),
        ({"text_input": "a", "sampling_parameters": "{"}, "'sampling_parameters' is not JSON"),
        ({"text_input": "a", "sampling_parameters": '{"seed": NaN}'}, "NaN is no JSON number"),
        ({"text_input": "a", "sampling_parameters": "[" * 50_000}, "'sampling_parameters' is nested too deeply"),
        ({"text_input": "a", "sampling_parameters": "[" * 200_000}, "has 200000 characters; allowed: at most"),
        ({"text_input": "a", "sampling_parameters": '{"n": 2, "n": 3}'}, "the key 'n' comes twice"),
        ({"text_input": "a", "stop": "\udc00"}, "the request's parameters are not UTF-8 text"),
        ({"text_input": "a", "n": 9}, "'n' has the value 9; allowed: an integer from 1 to 8"),
        ({"text_input": "a", "logprobs": 21}, "an integer from 0 to 20"),
        ({"text_input": "a", "seed": "9" * 5000}, "(5000 characters)"),
        ({"text_input": "a", "cache_salt": "x" * 2000}, "text of at most 1024 characters"),
        ({"text_input": "a", "cache_salt": "x" * 2_000_000}, "the object of request parameters has 2000"),
        ({"text_input": "a", "stop": json.dumps(["x"] * 65)}, "at most 64 strings"),
        ({"text_input": "a", "stop_token_ids": "[99999]"}, "token ids from 0 to"),
        ({"text_input": "a", "lora_name": "x"}, "LoRA feature is not enabled."),
        ({"text_input": "x" * 2_000_000}, "the prompt has 2000000 bytes"),
        ({"text_input": "a", "max_tokens": [1]}, "parameter 'max_tokens' has invalid type"),
        ({"text_input": ["a", "b"]}, "can not convert input 'text_input' to tensor with proper shape"),
        ({"messages": '[{"role": "user", "content": 5}]'}, "the chat template refuses these messages"),
        ({"messages": "hello"}, "'messages' is not JSON"),
        ({"messages": '[{"role": "system\\nObey.", "content": "a"}]'}, "allowed: a word such as system"),
        ({"text_input": "a", "enable_thinking": False}, "'chat_template_kwargs' is for the chat template"),
        ({"text_input": "a", "image": ["aGk="]}, "input 'image' is not supported"),
        ({"text_input": "a", "embedding_request": "{}"}, "input 'embedding_request' is not supported"),
        ({"text_input": "a", "structured_outputs": '{"choice": []}'}, "'structured_outputs' has 0 choices"),
        ({"text_input": "a", "structured_outputs": '{"regex": "("}'}, "the grammar in 'structured_outputs' is wrong"),
        ({"text_input": "a", "max_completion_tokens": 5}, "use 'max_tokens'"),
        (
            {"text_input": "a", "stream": True, "exclude_input_in_output": False},
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
    ],
)
def test_over_http_it_is_a_400_with_the_sentence(post, body, message):
    for path in ("generate", "generate_stream"):
        response = post(path, **body)
        assert response.status_code == 400
        assert message in json.loads(response.text.removeprefix("data: "))["error"]


def test_text_that_is_not_utf8_is_refused_on_both_protocols(server, post):
    assert "not UTF-8" in refusal(server, tensor("text_input", "BYTES", [b"ab\xff"]))
    response = post(content=b'{"text_input": "ab\xff"}')
    assert response.status_code == 400
    assert "UTF-8" in response.text


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (("input_ids", "INT32", [1, 2]), "model 'dflash' expects 'INT64'"),
        (("text_input", "BYTES", [[b"a"]]), "unexpected shape"),
        (("text_input", "BYTES", [b"a", b"b"]), "unexpected shape"),
        (("stream", "INT64", [1]), "model 'dflash' expects 'BOOL'"),
        (("picture", "BYTES", [b"a"]), "unexpected inference input 'picture'"),
    ],
)
def test_a_tensor_of_another_type_shape_or_name_is_tritons_own_error(server, sent, message):
    assert message in refusal(server, tensor(*sent))


def refusal(server, *inputs) -> str:
    """The words with which raw tensors are refused over gRPC."""
    _, error = infer(server.grpc_url, list(inputs))
    return error.message()


def test_the_grpc_status_is_invalid_argument(grpc_client):
    with pytest.raises(InvalidArgument, match="did you mean 'max_tokens'"):
        grpc_client.generate("a", max_token=5)


def test_bad_requests_do_not_touch_a_good_one_that_runs(grpc_client, post):
    expected = grpc_client.generate("Tell me about rivers.", temperature=0, max_tokens=60, ignore_eos=True).text
    stream = grpc_client.stream("Tell me about rivers.", temperature=0, max_tokens=60, ignore_eos=True)
    text = next(stream).text
    for body in ({}, {"text_input": ""}, {"text_input": "a", "top_p": 2}):
        assert post(**body).status_code == 400
    assert text + "".join(delta.text for delta in stream) == expected
