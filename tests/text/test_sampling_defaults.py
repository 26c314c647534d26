"""What a checkpoint's generation_config.json says of sampling."""

import json

import pytest

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.text.sampling_defaults import read_sampling_defaults


def test_the_fields_that_vllm_takes_are_taken_by_our_names(tmp_path):
    assert read_sampling_defaults(tmp_path) == {}
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 99, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({**given, "eos_token_id": [1, 2]}))
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 99}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds list; expected a JSON object"),
        ('{"top_p": 7}', "'top_p' has the value 7; .*; set generation_config to none to leave it out"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_load(tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_sampling_defaults(tmp_path)
