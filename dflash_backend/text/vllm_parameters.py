"""The sampling parameters of vLLM that this server does not have, and names that other servers use.

A client of vLLM may send every field of `SamplingParams`, most of them at their defaults. A neutral value is accepted;
any other is refused by name, with an alternative.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_NEUTRAL_CHARS = 16


@dataclass(frozen=True, slots=True)
class VllmParameter:
    """`neutral`: values besides null that ask for nothing. `instead`: what to do in place of other values."""

    neutral: tuple[Any, ...]
    instead: str

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether `value`, or the value that its text spells, is null or neutral."""
        if isinstance(value, str) and len(value) <= MAX_NEUTRAL_CHARS:
            value = _NAMED.get(value.lower(), value)
            if isinstance(value, str):
                value = _from_text(value)
        if value is None:
            return True
        if isinstance(value, list | dict | tuple | str):
            return not value and type(value) in map(type, self.neutral)
        return any(value == neutral for neutral in self.neutral if not isinstance(neutral, list | dict | str))


_NAMED = {"none": None, "null": None, "true": True, "false": False}


def _from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_NOT_YET = "this server cannot do that; leave it out"
_OF_PROMPT = "'prompt_logprobs' returns those of the whole prompt; leave it out"

VLLM_PARAMETERS: dict[str, VllmParameter] = {
    "prompt_logprob_token_ids": VllmParameter((), _OF_PROMPT),
    "prompt_logprob_start": VllmParameter((), _OF_PROMPT),
    "flat_logprobs": VllmParameter((False,), "log-probabilities come as a list with an object for each token"),
    "detokenize": VllmParameter((True,), "text is always sent; the input 'return_token_ids' sends token ids as well"),
    "spaces_between_special_tokens": VllmParameter((True,), "text is decoded as the tokenizer does"),
    "output_kind": VllmParameter((0,), "the input 'stream' says whether parts of the answer are sent"),
    "skip_clone": VllmParameter((True, False), "it has no effect here"),
    "output_text_buffer_length": VllmParameter((0,), "the server holds back what may become a stop string"),
    "guided_decoding": VllmParameter((), "use 'structured_outputs'"),
    "extra_args": VllmParameter(({},), "there are no plugins to take them"),
    "skip_reading_prefix_cache": VllmParameter((False,), "a new 'cache_salt' keeps a request from cached prefixes"),
    "thinking_token_budget": VllmParameter((-1,), "'chat_template_kwargs' can switch thinking off"),
    "repetition_detection": VllmParameter((), "'repetition_penalty' and 'frequency_penalty' hold repetition back"),
    "routed_experts_prompt_start": VllmParameter((0,), _NOT_YET),
    "trace_decode_token_ids": VllmParameter((), _NOT_YET),
    "early_stopping": VllmParameter((False,), "there is no beam search; 'n' asks for several answers"),
    "length_penalty": VllmParameter((1,), "there is no beam search; 'n' asks for several answers"),
    "use_beam_search": VllmParameter((False,), "there is no beam search; 'n' asks for several answers"),
    "logits_processors": VllmParameter(([],), "'logit_bias' changes the logits of single tokens"),
}

# What other servers and libraries call a parameter, with what to send here.
OTHER_NAMES: dict[str, str] = {
    "max_completion_tokens": "'max_tokens'",
    "max_new_tokens": "'max_tokens'",
    "max_length": "'max_tokens'",
    "num_predict": "'max_tokens'",
    "min_new_tokens": "'min_tokens'",
    "stop_sequences": "'stop'",
    "stop_strings": "'stop'",
    "stop_words": "'stop'",
    "eos_token_id": "'stop_token_ids'",
    "num_return_sequences": "'n'",
    "random_seed": "'seed'",
    "top_logprobs": "'logprobs'",
    "do_sample": "'temperature' of 0 for greedy decoding",
    "thinking": "'enable_thinking'",
}
