"""Writes `golden/`: what the packages `dflash` and `speculators`, and DeepSpec, compute for the cases of `cases.py`,
and what compressed-tensors makes of a weight.

`make setup` installs compressed-tensors, `make oracle` the other packages, `deepspec` says where DeepSpec comes from;
then `.venv/bin/python -m tests.oracle.write_golden`. The versions that ran are kept beside the results.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.oracle import (
    cases,
    compressed_tensors_library,
    deepspec,
    dflash2_cases,
    dspark_cases,
    eagle3_cases,
    ours,
    speculators_library,
    zlab,
)

GOLDEN = Path(__file__).parent / "golden"
FEATURE_LAYERS = [1, 2, 4]
NUM_FEATURE_TOKENS = 12
MAX_TOKENS = 160


def zlab_results(scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and JSON data."""
    target = cases.write_target(scratch / "target")
    tensors = {}
    for case in cases.ZLAB:
        draft = ours.write_zlab(scratch / case, case)
        for i, logits in enumerate(zlab.draft_logits(target, draft, case, cases.STEPS)):
            tensors[f"{case}/{i}"] = logits.contiguous()
    tensors["features"] = zlab.target_features(target, cases.token_ids(NUM_FEATURE_TOKENS), FEATURE_LAYERS)
    stop = json.loads((ours.DEMO_TARGET / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    stop = stop if isinstance(stop, list) else [stop]
    generated = {
        name: {"prompt": prompt} | zlab.generate(ours.DEMO_TARGET, ours.DEMO_DRAFT, prompt, stop, MAX_TOKENS)
        for name, prompt in ours.demo_prompts()
    }
    return tensors, {"versions": versions("dflash"), "max_tokens": MAX_TOKENS, "generated": generated}


def speculators_results(scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and JSON data."""
    target = cases.write_target(scratch / "target")
    tensors, configs, names = {}, {}, {}
    for name, case in cases.SPECULATORS.items():
        model = speculators_library.build(case, target)
        tensors[name] = speculators_library.draft_logits(model, name, cases.ANCHORS, cases.NUM_TOKENS).contiguous()
        model.save_pretrained(str(scratch / name))
        configs[name], names[name] = saved(scratch / name)
    speculators_library.convert(ours.DEMO_DRAFT, ours.DEMO_TARGET, scratch / "converted")
    configs["converted"], names["converted"] = saved(scratch / "converted")
    return tensors, {"versions": versions("speculators"), "configs": configs, "tensors": names}


def dflash2_results(scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and JSON data, of both packages."""
    target = cases.write_target(scratch / "target")
    tensors: dict[str, torch.Tensor] = {}
    drafts: dict[str, Any] = {}
    configs, names = {}, {}
    for case in dflash2_cases.ZLAB:
        draft = dflash2_cases.write_zlab(scratch / case, case)
        found = zlab.drafts(target, draft, case, dflash2_cases.STEPS)
        tensors |= {f"{case}/{i}": logits.contiguous() for i, (logits, _) in enumerate(found)}
        drafts[case] = [as_text(tokens) for _, tokens in found]
    _, drafter = zlab.load_pair(target, scratch / dflash2_cases.GROWING)
    drafter.save_pretrained(scratch / "saved")
    configs["zlab"], names["zlab"] = saved(scratch / "saved")
    grown = zlab.drafts(target, scratch / "saved", "growing", dflash2_cases.growing_steps())
    tensors |= {f"growing/{n}": grown[n - 1][0].contiguous() for n in dflash2_cases.KEPT}
    drafts["growing"] = [as_text(tokens) for _, tokens in grown]
    for name in dflash2_cases.SPECULATORS:
        model = speculators_library.build_dflash2(name, target)
        logits, paths = speculators_library.dflash2_drafts(model, name, cases.ANCHORS, cases.NUM_TOKENS)
        tensors[name], drafts[name] = logits.contiguous(), [as_text(tokens) for tokens in paths]
        model.save_pretrained(str(scratch / name))
        configs[name], names[name] = saved(scratch / name)
    return tensors, {
        "versions": versions("dflash") | versions("speculators"),
        "configs": configs,
        "tensors": names,
        "drafts": drafts,
    }


def dspark_results(scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and JSON data, of DeepSpec and of speculators."""
    target = cases.write_target(scratch / "target")
    tensors: dict[str, torch.Tensor] = {}
    drafts: dict[str, Any] = {}
    configs, names = {}, {}
    for case in dspark_cases.DEEPSPEC:
        key = f"deepspec {case}"
        draft = deepspec.save_case(case, target, scratch / key)
        configs[key], names[key] = saved(draft)
        found = deepspec.drafts(draft, case, dspark_cases.STEPS)
        for i, (logits, _, confidence) in enumerate(found):
            if i in dspark_cases.KEPT_STEPS:
                tensors[f"{key}/{i}"] = logits.contiguous()
            if confidence is not None:
                tensors[f"{key}/{i}/confidence"] = confidence.contiguous()
        drafts[key] = [as_text(tokens) for _, tokens, _ in found]
    for name in dspark_cases.SPECULATORS:
        model = speculators_library.build_dspark(name, target)
        logits, paths, sure = speculators_library.dspark_drafts(model, name, cases.ANCHORS, cases.NUM_TOKENS)
        tensors |= {name: logits[dspark_cases.KEPT_ANCHORS].contiguous(), f"{name}/confidence": sure.contiguous()}
        drafts[name] = [as_text(tokens) for tokens in paths]
        model.save_pretrained(str(scratch / name))
        configs[name], names[name] = saved(scratch / name)
    return tensors, {
        "versions": versions("speculators"),
        "configs": configs,
        "tensors": names,
        "drafts": drafts,
    }


def eagle3_results(scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and JSON data, of speculators."""
    target = cases.write_target(scratch / "target")
    tensors: dict[str, torch.Tensor] = {}
    drafts: dict[str, Any] = {}
    configs, names = {}, {}
    for name in eagle3_cases.SPECULATORS:
        model = speculators_library.build_eagle3(name, target)
        found = speculators_library.eagle3_drafts(model, name, eagle3_cases.LENGTHS)
        tensors[name] = torch.stack([logits for logits, _ in found])
        drafts[name] = [as_text(tokens) for _, tokens in found]
        if name == eagle3_cases.GROWING:
            grown = speculators_library.eagle3_drafts(model, name, range(1, eagle3_cases.NUM_LENGTHS + 1))
            tensors |= {f"growing/{n}": grown[n - 1][0] for n in eagle3_cases.KEPT}
            drafts["growing"] = [as_text(tokens) for _, tokens in grown]
        model.save_pretrained(str(scratch / name))
        configs[name], names[name] = saved(scratch / name)
    return tensors, {"versions": versions("speculators"), "configs": configs, "tensors": names, "drafts": drafts}


def compressed_tensors_results(scratch: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and JSON data, of compressed-tensors."""
    tensors, data = compressed_tensors_library.results(scratch)
    return tensors, data | {"versions": versions("compressed-tensors")}


def as_text(tokens: list[int]) -> str:
    """Token ids below 256, two digits each."""
    return bytes(tokens).hex()


def saved(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The config of a checkpoint, without the path of its verifier on this machine, and its tensors' names."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = "TARGET"
    with safe_open(directory / "model.safetensors", "pt") as tensors:
        return config, sorted(tensors.keys())


def versions(package: str) -> dict[str, str]:
    """Of the package that is the reference, and of what it ran on."""
    return {name: version(name) for name in (package, "torch", "transformers")}


def golden_json(name: str) -> dict[str, Any]:
    """A JSON file of `golden/`."""
    data: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return data


RESULTS = {
    "zlab": zlab_results,
    "speculators": speculators_results,
    "dflash2": dflash2_results,
    "dspark": dspark_results,
    "eagle3": eagle3_results,
    "compressed_tensors": compressed_tensors_results,
}


def main(names: Sequence[str]) -> None:
    """Entry point. names: of the files to write, all where there are none."""
    GOLDEN.mkdir(exist_ok=True)
    for name in names or RESULTS:
        results = RESULTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            tensors, data = results(Path(scratch))
        save_file(tensors, GOLDEN / f"{name}.safetensors")
        (GOLDEN / f"{name}.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for file in sorted(GOLDEN.iterdir()):
        print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
