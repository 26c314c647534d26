"""A DSpark config is read as DeepSpec, speculators and vLLM read it; what would be misread is refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.drafters.dspark.config import DSparkSpec, MarkovSpec
from dflash_backend.drafters.dspark.drafter import DSparkDrafter
from dflash_backend.drafters.registry import is_drafter, read_draft
from tests.drafters.drafts import dspark_fields, edit, make_dspark, put
from tests.support.speculators_checkpoint import speculators_config
from tests.support.tiny_models import DRAFT_INTERMEDIATE, TARGET_LAYER_IDS, decoder_config, make_draft, save_checkpoint

NO_ANCHOR = "missing in config.json and read as sample_from_anchor = {}"
HEADS = dspark_fields("vanilla", 256)


def read(directory: Path) -> DSparkSpec:
    spec = read_draft(directory)
    assert isinstance(spec, DSparkSpec)
    return spec


def make_speculators(directory: Path, k: int = 8, **fields: Any) -> None:
    """A DSpark drafter in the speculators format, without any field of its own method but `fields`."""
    make_draft(directory)
    config = json.loads((directory / "config.json").read_text())
    wrapped = speculators_config(config, None, config["vocab_size"], k)
    del wrapped["sample_from_anchor"]
    own = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    (directory / "config.json").write_text(json.dumps(wrapped | own | fields))


def test_a_config_of_deepspec_is_read(tmp_path: Path) -> None:
    make_dspark(tmp_path, kind="gated")
    assert is_drafter(tmp_path)
    spec = read(tmp_path)
    assert (spec.format, spec.method, spec.notes) == ("deepspec", "dspark", ())
    assert (spec.from_anchor, spec.block_size, spec.num_speculative_tokens, spec.max_speculative_tokens) == (
        True, 8, 8, 8,
    )  # fmt: skip
    assert (spec.markov, spec.has_confidence_head, spec.confidence_reads_markov) == (MarkovSpec("gated", 6), True, True)
    assert (spec.target_layer_ids, spec.causal) == (tuple(TARGET_LAYER_IDS), (False, False))
    assert "each place of which gives a draft" in spec.limit_in_words


def test_a_published_config_is_read_by_its_facts(tmp_path: Path) -> None:
    """The fields of the 4B drafter of the authors, as their training config and `build_draft_config` make them."""
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "num_target_layers": 36,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "num_anchors": 512,
        "layer_types": ["full_attention"] * 2,
        "max_window_layers": 36,
        "use_sliding_window": False,
        "sliding_window": None,
        "dtype": "bfloat16",
        **dspark_fields("vanilla", 256),
    }
    make_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(decoder_config(2, DRAFT_INTERMEDIATE, 151936) | own))
    spec = read(tmp_path)
    assert [NO_ANCHOR.format("true (as DeepSpec's own code drafts)") in note for note in spec.notes] == [True]
    assert (spec.num_speculative_tokens, spec.target_layer_ids) == (7, (1, 9, 17, 25, 33))
    assert (spec.markov, spec.draft_vocab_size, spec.normed_last_layer) == (MarkovSpec("vanilla", 256), 151936, False)


def test_what_deepspec_saves_as_dflash_has_no_heads_and_still_drafts_from_the_anchor(tmp_path: Path) -> None:
    make_dspark(tmp_path, rank=0, confidence=False)
    edit(tmp_path / "config.json", lambda data: [data.pop(field) for field in ("markov_head_type",)])
    spec = read(tmp_path)
    assert (spec.markov, spec.has_confidence_head, spec.from_anchor) == (None, False, True)
    DSparkDrafter.check_weights(spec)


def test_the_last_layers_feature_is_taken_before_the_norm(tmp_path: Path) -> None:
    make_dspark(tmp_path, target_layer_ids=[1, 4])
    assert not read(tmp_path).normed_last_layer


def test_masks_alone_give_one_draft_less(tmp_path: Path) -> None:
    make_dspark(tmp_path, sample_from_anchor=False)
    spec = read(tmp_path)
    assert (spec.from_anchor, spec.num_speculative_tokens, spec.max_speculative_tokens) == (False, 7, 7)
    assert "the anchor takes one place" in spec.limit_in_words


def test_a_speculators_config_has_the_librarys_defaults_and_says_so(tmp_path: Path) -> None:
    make_speculators(tmp_path, sample_from_anchor=True)
    spec = read(tmp_path)
    assert (spec.format, spec.from_anchor) == ("speculators", True)
    assert [note.partition(";")[0] for note in spec.notes] == [
        'missing in config.json and read as markov_rank = 256, markov_head_type = "vanilla", '
        "enable_confidence_head = true, confidence_head_with_markov = true"
    ]
    assert (spec.markov, spec.has_confidence_head, spec.confidence_reads_markov) == (
        MarkovSpec("vanilla", 256), True, True,
    )  # fmt: skip
    assert spec.num_speculative_tokens == 8


@pytest.mark.parametrize(
    ("proposed", "from_anchor", "k", "why"),
    [
        (8, True, 8, "slots 0 to 7; speculative_tokens is 8, and the block has 8 places"),
        (7, False, 7, "slots 1 to 7; speculative_tokens is 7, and the block has 8 places"),
        (5, False, 5, "slots 1 to 7; nothing tells, and vLLM reads it so; the library's class has true"),
        (None, False, 7, "slots 1 to 7; nothing tells, and vLLM reads it so; the library's class has true"),
    ],
)
def test_who_drafts_first_is_told_by_the_proposal_where_no_field_says_it(
    proposed: int | None, from_anchor: bool, k: int, why: str, tmp_path: Path
) -> None:
    make_speculators(tmp_path, proposed or 8, **HEADS)
    if proposed is None:
        edit(tmp_path / "config.json", lambda data: data["speculators_config"].pop("proposal_methods"))
    spec = read(tmp_path)
    assert (spec.from_anchor, spec.num_speculative_tokens, spec.max_speculative_tokens) == (
        from_anchor,
        k,
        8 if from_anchor else 7,
    )
    says = NO_ANCHOR.format(f"{str(from_anchor).lower()} (drafts come from {why})")
    assert [says in note for note in spec.notes] == [True]
    # What the operator writes wins, and nothing is said.
    for value in (False, True):
        put(tmp_path / "config.json", sample_from_anchor=value)
        assert read(tmp_path).from_anchor is value
        assert not any("sample_from_anchor" in note for note in read(tmp_path).notes)


@pytest.mark.parametrize(("from_anchor", "k", "expected"), [(True, 8, 8), (True, 5, 5), (False, 7, 7)])
def test_k_is_the_proposals(from_anchor: bool, k: int, expected: int, tmp_path: Path) -> None:
    make_speculators(tmp_path, k, sample_from_anchor=from_anchor, **HEADS)
    spec = read(tmp_path)
    assert (spec.num_speculative_tokens, spec.notes) == (expected, ())


@pytest.mark.parametrize(
    ("from_anchor", "k", "note"),
    [(True, 9, "k is 8, as a block of 8 has no more places"), (False, 8, "k is 7, as the anchor takes one place")],
)
def test_a_k_that_no_block_has_is_cut_and_said(from_anchor: bool, k: int, note: str, tmp_path: Path) -> None:
    make_speculators(tmp_path, k, sample_from_anchor=from_anchor, **HEADS)
    spec = read(tmp_path)
    assert spec.num_speculative_tokens == spec.max_speculative_tokens
    assert [note in each for each in spec.notes] == [True]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"markov_rank": None}, "'markov_rank' is missing; expected an integer from 0 to 4096"),
    ({"markov_rank": 5000}, "'markov_rank' is 5000"),
    ({"markov_head_type": None}, "'markov_head_type' is missing"),
    ({"markov_head_type": "fir"}, "'markov_head_type' is 'fir'; expected one of vanilla, gated, rnn"),
    ({"enable_confidence_head": None}, "'enable_confidence_head' is missing; expected true or false"),
    ({"confidence_head_with_markov": None}, "'confidence_head_with_markov' is missing; expected true or false"),
    ({"confidence_head_with_markov": 1}, "'confidence_head_with_markov' is 1; expected true or false"),
    ({"markov_rank": 0}, "'markov_rank' is 0; expected at least 1, as confidence_head_with_markov is true"),
    ({"sample_from_anchor": "yes"}, "'sample_from_anchor' is 'yes'"),
    ({"output_multiplier": 2.0}, "'output_multiplier' is 2.0; expected no such field: it is not part of DSpark"),
    ({"input_embedding_scale": 2.0}, "'input_embedding_scale' is 2.0; .* not part of DSpark"),
    ({"dflash_config": {"final_logit_softcapping": 30}}, "dflash_config: field 'final_logit_softcapping' is 30; .*"),
    ({"dflash_config": {"sample_from_anchor": True}}, "dflash_config: field 'sample_from_anchor' is True"),
    ({"dflash_config": {"markov_rank": 4}}, "dflash_config: field 'markov_rank' is 4; .* Markov head of DSpark"),
    ({"dflash_config": {"projector_type": "dspark"}}, "'projector_type' is 'dspark'"),
    ({"shift_label": True}, "'shift_label' is True; .*drafts shifted by one position"),
    ({"use_confidence_head": True}, "'use_confidence_head' is True"),
    ({"conv_kernel_size": 2}, "'conv_kernel_size' is 2; .*convolutions of DFlash2"),
    ({"selector_rank": 2}, "'selector_rank' is 2; .*candidate selector of DFlash2"),
    ({"dspark_draft_topk": 64}, "'dspark_draft_topk' is 64; .*candidates of vLLM's DSpark"),
    ({"dspark_backbone_conv_enabled": True}, "'dspark_backbone_conv_enabled' is True; .*DSpark with convolutions"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS)
def test_what_would_be_misread_is_refused_by_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_dspark(tmp_path)
    put(tmp_path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=message):
        read_draft(tmp_path)


def test_heads_without_their_tensors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = make_dspark(tmp_path, kind="rnn")
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("markov_head.joint_proj.bias", "markov_head.markov_w2.weight", "confidence_head.proj.weight"):
        save_checkpoint(tmp_path, config, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
            DSparkDrafter.check_weights(read(tmp_path))


def test_a_table_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    make_dspark(tmp_path, rank=6, confidence=False)
    put(tmp_path / "config.json", markov_rank=7)
    with pytest.raises(CheckpointError, match=r"'markov_head.markov_w1.weight' has shape \[97, 6\]"):
        DSparkDrafter.check_weights(read(tmp_path))


def test_a_head_that_the_config_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    make_dspark(tmp_path)
    put(tmp_path / "config.json", enable_confidence_head=False)
    with pytest.raises(CheckpointError, match=r"confidence_head.proj"):
        DSparkDrafter.check_weights(read(tmp_path))


@pytest.mark.parametrize(
    ("draft", "markov", "confidence"),
    [
        ({"kind": "rnn"}, "rnn, of rank 6", "reads the output and the token before"),
        ({"reads_markov": False}, "vanilla, of rank 6", "reads the output"),
        ({"rank": 0, "confidence": False}, "none", "none"),
    ],
)
def test_what_is_particular_to_the_method_is_said(
    draft: dict[str, Any], markov: str, confidence: str, tmp_path: Path
) -> None:
    make_dspark(tmp_path, **draft)
    facts = dict(read(tmp_path).facts())
    assert (facts["Markov head"], facts["confidence head"]) == (markov, confidence)
    assert facts["block"] == "8 places, each of which gives a draft, the anchor's the first"


def test_a_drafter_whose_masks_alone_draft_has_the_block_of_dflash(tmp_path: Path) -> None:
    make_dspark(tmp_path, sample_from_anchor=False)
    assert dict(read(tmp_path).facts())["block"] == "8 places: the anchor and up to 7 drafts"


def test_a_dflash_drafter_still_knows_no_markov_head(tmp_path: Path) -> None:
    make_dspark(tmp_path, architectures=["DFlashDraftModel"])
    with pytest.raises(CheckpointError, match="Markov head of DSpark is not part of DFlash"):
        read_draft(tmp_path)
