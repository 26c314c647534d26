"""Published drafters, by target: what `inspect --list` shows, and what a server without a drafter is told of.

`DRAFTERS` is the one table. Whether a drafter is supported is not in it: that follows from the target families and the
drafting methods that there are. Each entry is stated in the source that it names; none was downloaded.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dflash_backend.checkpoints.families import FAMILIES
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.drafters.registry import METHODS

# Of the families of targets below, the architecture of each that is supported; others go by their name alone.
ARCHITECTURES = {
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen3-MoE": "Qwen3MoeForCausalLM",
    "Llama 3": "LlamaForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "Qwen3-Next": "Qwen3NextForCausalLM",
    "Qwen3.5": "Qwen3_5ForCausalLM",
    "Gemma 4": "Gemma4ForCausalLM",
}
# Also of methods that are published and not supported: P-EAGLE.
NAMES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
ZLAB = "github.com/z-lab/dflash, README"
SPECULATORS = "github.com/vllm-project/speculators, README"
DEEPSPEC = "github.com/deepseek-ai/DeepSpec, README"
EAGLE = "github.com/SafeAILab/EAGLE, README"
# Where a hub id's snapshot lies in the local cache.
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


class Target(NamedTuple):
    """A target by its hub id, and the family that it belongs to."""

    name: str
    family: str


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter by its hub id. method: as `METHODS` names it. architecture: what its `config.json` says in its authors'
    format; empty for the format of speculators. pickled: its weights are in `pytorch_model.bin` alone."""

    target: Target
    name: str
    method: str
    source: str
    architecture: str = ""
    pickled: bool = False

    @property
    def kind(self) -> str:
        """The method in the field's words."""
        return NAMES[self.method]

    @property
    def format(self) -> str:
        """Whose format its checkpoint has."""
        return {ZLAB: "z-lab", SPECULATORS: "speculators", DEEPSPEC: "DeepSpec", EAGLE: "EAGLE"}[self.source]

    @property
    def unsupported(self) -> str | None:
        """Why it is not supported; None where it is."""
        method = METHODS.get(self.method)
        if (reason := _unsupported_family(self.target)) is not None:
            return reason
        if method is None or method.formats is None:
            return f"{self.kind} drafters are not supported"
        architectures = [name for each in METHODS.values() if each.formats for name in each.formats.architectures]
        if self.architecture and self.architecture not in architectures:
            return f"its format ({self.architecture}) is not supported"
        if self.pickled:
            return "pickled weights (pytorch_model.bin) are not supported; convert them to safetensors"
        return None


QWEN3_4B, QWEN3_8B = Target("Qwen/Qwen3-4B", "Qwen3"), Target("Qwen/Qwen3-8B", "Qwen3")
QWEN3_14B, QWEN3_32B = Target("Qwen/Qwen3-14B", "Qwen3"), Target("Qwen/Qwen3-32B", "Qwen3")
QWEN3_30B = Target("Qwen/Qwen3-30B-A3B", "Qwen3-MoE")
QWEN3_30B_2507 = Target("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-MoE")
QWEN3_235B = Target("Qwen/Qwen3-235B-A22B", "Qwen3-MoE")
QWEN3_235B_2507 = Target("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-MoE")
QWEN3_CODER = Target("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-MoE")
LLAMA_8B = Target("meta-llama/Llama-3.1-8B-Instruct", "Llama 3")
LLAMA_70B = Target("meta-llama/Llama-3.3-70B-Instruct", "Llama 3")
GPT_OSS_20B, GPT_OSS_120B = Target("openai/gpt-oss-20b", "gpt-oss"), Target("openai/gpt-oss-120b", "gpt-oss")
GEMMA_12B = Target("google/gemma-4-12B-it", "Gemma 4")
GEMMA_26B, GEMMA_31B = Target("google/gemma-4-26B-A4B-it", "Gemma 4"), Target("google/gemma-4-31B-it", "Gemma 4")
QWEN36_35B = Target("Qwen/Qwen3.6-35B-A3B", "Qwen3.5")


def _zlab(target: Target, name: str, method: str = "dflash") -> PublishedDrafter:
    architecture = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[method]
    return PublishedDrafter(target, f"z-lab/{name}", method, ZLAB, architecture)


def _speculators(target: Target, name: str, method: str) -> PublishedDrafter:
    return PublishedDrafter(target, f"RedHatAI/{name}", method, SPECULATORS)


def _deepspec(target: Target, name: str, method: str, family: str = "Qwen3") -> PublishedDrafter:
    architecture = f"{family}Eagle3Model" if method == "eagle3" else f"{family}DSparkModel"
    return PublishedDrafter(target, f"deepseek-ai/{name}", method, DEEPSPEC, architecture)


def _eagle(target: Target, name: str) -> PublishedDrafter:
    return PublishedDrafter(target, f"yuhuili/{name}", "eagle3", EAGLE, "LlamaForCausalLMEagle3", pickled=True)


DRAFTERS: tuple[PublishedDrafter, ...] = (
    _zlab(QWEN3_4B, "Qwen3-4B-DFlash-b16"),
    _zlab(QWEN3_8B, "Qwen3-8B-DFlash-b16"),
    _zlab(QWEN3_CODER, "Qwen3-Coder-30B-A3B-DFlash"),
    _zlab(LLAMA_8B, "LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    _zlab(GPT_OSS_20B, "gpt-oss-20b-DFlash"),
    _zlab(GPT_OSS_120B, "gpt-oss-120b-DFlash"),
    _zlab(Target("Qwen/Qwen3-Coder-Next", "Qwen3-Next"), "Qwen3-Coder-Next-DFlash"),
    *(
        _zlab(Target(f"Qwen/{name}", "Qwen3.5"), f"{name}-DFlash")
        for name in ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.6-27B")
    ),
    _zlab(QWEN36_35B, "Qwen3.6-35B-A3B-DFlash"),
    _zlab(Target("Qwen/Qwen3.8-27B", "Qwen3.5"), "Qwen3.8-27B-DFlash2", "dflash2"),
    _zlab(Target("meta-models/Muse-Glimmer-30B", "Muse"), "Muse-Glimmer-30B-DFlash2", "dflash2"),
    _zlab(GEMMA_26B, "gemma-4-26B-A4B-it-DFlash"),
    _zlab(GEMMA_31B, "gemma-4-31B-it-DFlash"),
    *(_zlab(Target(f"moonshotai/{name}", "Kimi K2"), f"{name}-DFlash") for name in ("Kimi-K2.5", "Kimi-K2.6")),
    *(_zlab(Target(f"MiniMaxAI/{name}", "MiniMax M2"), f"{name}-DFlash") for name in ("MiniMax-M2.5", "MiniMax-M2.7")),
    _speculators(QWEN3_8B, "Qwen3-8B-speculator.dflash", "dflash"),
    _speculators(QWEN3_8B, "Qwen3-8B-speculator.eagle3", "eagle3"),
    _speculators(QWEN3_8B, "Qwen3-8B-speculator.peagle", "peagle"),
    _speculators(QWEN3_14B, "Qwen3-14B-speculator.eagle3", "eagle3"),
    _speculators(QWEN3_32B, "Qwen3-32B-speculator.eagle3", "eagle3"),
    _speculators(QWEN3_30B, "Qwen3-30B-A3B-speculator.dflash", "dflash"),
    _speculators(QWEN3_30B_2507, "Qwen3-30B-A3B-Instruct-2507-speculator.dflash", "dflash"),
    _speculators(QWEN3_30B_2507, "Qwen3-30B-A3B-Instruct-2507-speculator.eagle3", "eagle3"),
    _speculators(QWEN3_235B, "Qwen3-235B-A22B-speculator.eagle3", "eagle3"),
    _speculators(QWEN3_235B_2507, "Qwen3-235B-A22B-Instruct-2507-speculator.eagle3", "eagle3"),
    _speculators(LLAMA_8B, "Llama-3.1-8B-Instruct-speculator.eagle3", "eagle3"),
    _speculators(LLAMA_70B, "Llama-3.3-70B-Instruct-speculator.eagle3", "eagle3"),
    _speculators(GPT_OSS_20B, "gpt-oss-20b-speculator.eagle3", "eagle3"),
    _speculators(GPT_OSS_120B, "gpt-oss-120b-speculator.eagle3", "eagle3"),
    _speculators(GEMMA_31B, "gemma-4-31B-it-speculator.dflash", "dflash"),
    _speculators(GEMMA_31B, "gemma-4-31B-it-speculator.eagle3", "eagle3"),
    _speculators(GEMMA_26B, "gemma-4-26B-A4B-it-speculator.eagle3", "eagle3"),
    _speculators(QWEN36_35B, "Qwen3.6-35B-A3B-speculator.dspark", "dspark"),
    *(
        _deepspec(target, f"{method}_qwen3_{size}_{ending}", method)
        for method, ending in (("dflash", "block7"), ("dspark", "block7"), ("eagle3", "ttt7"))
        for target, size in ((QWEN3_4B, "4b"), (QWEN3_8B, "8b"), (QWEN3_14B, "14b"))
    ),
    *(
        _deepspec(GEMMA_12B, f"{method}_gemma4_12b_{ending}", method, "Gemma4")
        for method, ending in (("dflash", "block7"), ("dspark", "block7"), ("eagle3", "ttt7"))
    ),
    _eagle(LLAMA_8B, "EAGLE3-LLaMA3.1-Instruct-8B"),
    _eagle(LLAMA_70B, "EAGLE3-LLaMA3.3-Instruct-70B"),
)


def published_for(target: str, directory: Path | None = None) -> tuple[PublishedDrafter, ...]:
    """The supported drafters of a target, named by a hub id, by a directory of the hub's local cache, or by the id that
    the `config.json` in its `directory` says that it came from."""
    names = {target.lower()}
    if (found := _SNAPSHOT.search(f"{Path(target).expanduser()}/")) is not None:
        names.add("/".join(found.groups()).lower())
    if directory is not None:
        with contextlib.suppress(CheckpointError):  # which is told where the checkpoint is read
            config = JsonReader.load(directory / "config.json")
            names.add(config.string("_name_or_path", default="").lower())
    return tuple(each for each in DRAFTERS if each.target.name.lower() in names and each.unsupported is None)


def unsupported_target(name: str) -> str | None:
    """Why a target that the table knows by this hub id is not supported; None where it is, or is not known."""
    known = next((each.target for each in DRAFTERS if each.target.name.lower() == name.lower()), None)
    return None if known is None else _unsupported_family(known)


def _unsupported_family(target: Target) -> str | None:
    if ARCHITECTURES.get(target.family) in FAMILIES:
        return None
    return f"targets of the family {target.family} are not supported"


def published_like(words: str) -> tuple[PublishedDrafter, ...]:
    """Those whose target or own hub id contains `words`; all for none."""
    return tuple(each for each in DRAFTERS if words.lower() in f"{each.target.name}\n{each.name}".lower())
