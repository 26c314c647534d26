"""What a checkpoint is and how it was read, in words: for the server's log at load and for `dflash-triton inspect`.

A misread checkpoint only shows as lower acceptance, so everything that could be read otherwise is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

from dflash_backend.checkpoints.files import DTYPE_BYTES, code_files, num_weights, read_headers, weight_files
from dflash_backend.checkpoints.gguf.blocks import BITS
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.keepable import kept_bytes
from dflash_backend.checkpoints.quantization.stored import quantised, shape_of
from dflash_backend.checkpoints.rope import rope_in_words
from dflash_backend.checkpoints.spec import DecoderSpec, DeltaNetSpec, Gemma4Spec, TargetSpec

Facts = list[tuple[str, str]]
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MANY_RUNS = 6
SHOWN_LAYERS = 3


def target_facts(spec: TargetSpec, dtype: str = "") -> Facts:
    """Label and text of what was read of a target. dtype: what it is loaded in, if not in its own. Raises
    `CheckpointError` when its files are gone."""
    embeddings = "tied: the LM head is the embedding" if spec.tie_word_embeddings else "embedding and LM head apart"
    ends = ", ".join(map(str, spec.eos_token_ids)) or "none"
    gguf = JsonReader.load(spec.path / "config.json").object("gguf")
    return [
        ("directory", str(spec.path)),
        *([("converted from", gguf.string("file"))] if gguf.given("file") else []),
        ("architecture", spec.architecture),
        *([("not served", f"{', '.join(spec.left_out)}: the text part alone is loaded")] if spec.left_out else []),
        *decoder_facts(spec.decoder),
        ("vocabulary", f"{spec.vocab_size} tokens, {embeddings}"),
        ("end of sequence", ends),
        *file_facts(spec.path, spec.dtype, dtype),
        *_mxfp4_facts(spec, dtype or spec.dtype),
        *warnings(spec.notes),
    ]


def warnings(notes: Sequence[str]) -> Facts:
    """What was read in one of several ways. Each has a label of its own, as facts become an object in JSON."""
    return [(f"warning {i}" if i > 1 else "warning", note) for i, note in enumerate(notes, 1)]


def _mxfp4_facts(spec: TargetSpec, dtype: str) -> Facts:
    """How much memory experts take that are stored in MXFP4."""
    if spec.decoder.moe is None or not spec.decoder.moe.mxfp4:
        return []
    packed = {name: header for name, header in read_headers(spec.path).items() if header.dtype == "U8"}
    stored = sum(header.num_bytes for header in packed.values())
    loaded = sum(num_weights(name, header) for name, header in packed.items()) * FLOAT_BYTES[dtype]
    on_disk, in_memory = (f"{size / 1024**2:.1f} MiB" for size in (stored, loaded))
    of_gpu = f"experts of {on_disk} on disk stay so on a GPU, whose products read codes"
    return [("MXFP4", f"{of_gpu}, and are {in_memory} of {dtype} in memory on a CPU")]


def decoder_facts(decoder: DecoderSpec) -> Facts:
    """Label and text of a decoder stack."""
    biases = [name for name, has in (("attention", decoder.output_bias), ("MLP", decoder.mlp_bias)) if has]
    facts = [
        ("layers", str(decoder.num_layers)),
        ("hidden size", f"{decoder.hidden_size}, MLP {decoder.intermediate_size}"),
        (
            "heads",
            f"{decoder.num_heads} for queries, {decoder.num_kv_heads} for keys and values, of size {decoder.head_dim}"
            + (" in layers with a window" if decoder.gemma4 else ""),
        ),
        (
            "rotary embedding",
            rope_in_words(decoder.rope)
            + (f", of {decoder.rotary_dim} numbers of a head" if decoder.rotary_dim else ""),
        ),
        ("positions", str(decoder.max_len)),
        ("attention", runs(_attention_in_words(decoder))),
    ]
    if decoder.delta_net is not None:
        facts.append(("gated delta net", _delta_net_in_words(decoder.delta_net)))
    if decoder.gemma4 is not None:
        facts.append(("layers that see everything", _global_layers_in_words(decoder.gemma4)))
        if decoder.gemma4.softcap is not None:
            facts.append(("logits", f"soft-capped at {decoder.gemma4.softcap:g}"))
    if decoder.sinks:
        facts.append(("attention sinks", "a learned logit of each query head"))
    if biases:
        facts.append(("biases", " and ".join(biases)))
    if decoder.moe is not None:
        moe = decoder.moe
        sizes = f"{moe.num_experts} of size {moe.intermediate_size}, {moe.experts_per_token} for a token"
        weights = "scaled to sum to 1" if moe.norm_topk_prob else "as the router gives them"
        shared = f"; a shared one of size {moe.shared_size}" if moe.shared_size else ""
        where = f"in {sum(moe.sparse_layers)} of {decoder.num_layers} layers"
        facts.append(("experts", f"{sizes}, {where}; weights {weights}{shared}"))
    return facts


def _attention_in_words(decoder: DecoderSpec) -> list[str]:
    """What attends in each layer."""
    gated = ", gated" if decoder.attention_gate else ""
    return [
        (f"window of {window}" if window else "full") + gated if decoder.has_attention(index) else "gated delta net"
        for index, window in enumerate(decoder.sliding_windows)
    ]


def _global_layers_in_words(own: Gemma4Spec) -> str:
    values = "whose values are their keys" if own.keys_are_values else "with values of their own"
    return (
        f"{sum(own.global_layers)}, with {own.num_kv_heads} heads of size {own.head_dim} for keys, {values}; rotary "
        f"embedding: {rope_in_words(own.rope)}"
    )


def _delta_net_in_words(net: DeltaNetSpec) -> str:
    return (
        f"{net.num_key_heads} heads of size {net.key_head_dim} for queries and keys, {net.num_value_heads} of size "
        f"{net.value_head_dim} for values, convolution of {net.conv_width}; a request's state takes "
        f"{net.state_bytes(4) / 1024**2:.2f} MiB in float32, whatever its length"
    )


def file_facts(directory: Path, dtype: str, served: str = "") -> Facts:
    """Label and text of the files of a checkpoint whose own dtype is `dtype`. served: what it is loaded in, if not in
    its own."""
    size = weight_bytes(directory)
    facts = [
        ("weights", f"{dtype}, {size / 1024**2:.1f} MiB on disk"),
        *_quantised_facts(directory, served or dtype),
        *_block_facts(directory, served or dtype),
    ]
    code = code_files(directory)
    if JsonReader.load(directory / "config.json").given("auto_map") or code:
        facts.append(("code", f"{', '.join(code) or 'named by auto_map'}: never run, and not needed"))
    return facts


def _quantised_facts(directory: Path, served: str) -> Facts:
    """The schemes of quantised weights, what they take on disk and in memory, and what their products are made of."""
    quantization = load_quantization(directory)
    if quantization is None:
        return []
    headers = read_headers(directory)
    weights = quantised(headers, quantization)
    sizes = {name: header.num_bytes for name, header in headers.items() if header.dtype in DTYPE_BYTES}
    stored = sum(size for name, size in sizes.items() if name.rpartition(".")[0] in weights)
    numbers = sum(math.prod(shape_of(name, scheme, headers)) for name, scheme in weights.items())
    counts = Counter(scheme.in_words() for scheme in weights.values())
    schemes = "; ".join(f"{scheme} ({count} projections)" for scheme, count in counts.items())
    files, memory = (f"{size / 1024**2:.1f} MiB" for size in (stored, numbers * FLOAT_BYTES[served]))
    kept, num_kept = kept_bytes(headers, quantization)
    share = f"{100 * num_kept / max(numbers, 1):.0f} % of these weights in {kept / 1024**2:.1f} MiB of memory"
    return [
        ("quantised", f"{quantization.method}: {schemes}; {8 * stored / max(numbers, 1):.2f} bits a weight"),
        ("kept", f"on a GPU, whose products read codes: {share}, the others dequantised; on a CPU none"),
        (
            "dequantised",
            f"at load: {files} in the files are {memory} of {served} in memory; activations are not quantised",
        ),
    ]


def _block_facts(directory: Path, served: str) -> Facts:
    """The types of GGUF that weights have, and what they take in the memory of a CPU, where experts are numbers."""
    blocks = {name: header for name, header in read_headers(directory).items() if header.blocks}
    if not blocks:
        return []
    counts = Counter(one.blocks for one in blocks.values())
    kinds = ", ".join(f"{kind} ({count} tensors)" for kind, count in counts.items())
    of_number = 8.0 * FLOAT_BYTES[served]
    bits = sum(
        math.prod(one.shape) * (of_number if ".experts." in name else BITS.get(one.blocks, of_number))
        for name, one in blocks.items()
    )
    stored = sum(one.num_bytes for one in blocks.values())
    in_files, in_memory = (f"{size / 1024**2:.1f} MiB" for size in (stored, bits / 8))
    of_cpu = f"products of a CPU read codes of {', '.join(BITS)}, so about {in_memory} in its memory"
    return [("blocks", f"{kinds}: {in_files} in the files; {of_cpu}; elsewhere all become {served}")]


def weight_bytes(directory: Path) -> int:
    """Size of a checkpoint's weights on disk, in bytes."""
    return sum(file.stat().st_size for file in weight_files(directory))


def runs(words: list[str]) -> str:
    """`a in layers 0-3, b in layer 4`; `a in all layers` where they agree; `a in 12 layers (0, 2, 4, ...)` where they
    change often."""
    if len(set(words)) == 1:
        return f"{words[0]} in all layers"
    if sum(a != b for a, b in pairwise(words)) >= MANY_RUNS:
        return ", ".join(_layers(word, words) for word in dict.fromkeys(words))
    parts = []
    first = 0
    for word, group in groupby(words):
        last = first + len(list(group)) - 1
        parts.append(f"{word} in " + (f"layer {first}" if first == last else f"layers {first}-{last}"))
        first = last + 1
    return ", ".join(parts)


def _layers(word: str, words: list[str]) -> str:
    layers = [str(layer) for layer, other in enumerate(words) if other == word]
    more = ", ..." if len(layers) > SHOWN_LAYERS else ""
    return f"{word} in {len(layers)} layers ({', '.join(layers[:SHOWN_LAYERS])}{more})"
