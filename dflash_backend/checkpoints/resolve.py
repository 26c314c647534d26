"""From settings to a pair of specs: where the models lie, and whether they belong together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import DraftSpec, TargetSpec
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.checkpoints.zlab import is_zlab, read_zlab
from dflash_backend.config import EngineConfig, asset_path


@dataclass(frozen=True)
class ModelPair:
    """A target and, when there is speculation, its drafter. `warning` is for the log."""

    target: TargetSpec
    draft: DraftSpec | None
    num_speculative_tokens: int
    warning: str | None = None


def resolve_target_dir(config: EngineConfig) -> Path:
    """The directory of the target and its tokenizer. Raises `CheckpointError`."""
    if not config.target_model:
        return asset_path("demo", "pair", "target")
    return find_model(config.target_model, "target_model")


def resolve_pair(config: EngineConfig) -> ModelPair:
    """Read both checkpoints that the settings name and check that they fit. Raises `CheckpointError`."""
    target = read_target(resolve_target_dir(config))
    draft_dir, warning = _draft_dir(config)
    if draft_dir is None:
        if config.num_speculative_tokens:
            raise CheckpointError(
                f"num_speculative_tokens is {config.num_speculative_tokens} but there is no drafter; set draft_model"
            )
        return ModelPair(target, None, 0, warning)
    draft = read_draft(draft_dir)
    if config.causal is not None:
        draft = dataclasses.replace(draft, causal=(config.causal,) * draft.decoder.num_layers)
    check_pair(target, draft)
    k = _speculative_tokens(config, draft)
    return ModelPair(target, draft if k else None, k)


def _draft_dir(config: EngineConfig) -> tuple[Path | None, str | None]:
    if config.draft_model:
        return find_model(config.draft_model, "draft_model"), None
    if config.draft_model == "":
        return None, None
    if not config.target_model:
        return asset_path("demo", "pair", "draft"), None
    return None, f"no draft_model is set for {config.target_model}: it is served without speculation"


def _speculative_tokens(config: EngineConfig, draft: DraftSpec) -> int:
    wanted = config.num_speculative_tokens
    trained = draft.max_speculative_tokens
    if wanted is None:
        return trained
    if wanted > trained:
        raise CheckpointError(
            f"num_speculative_tokens is {wanted}; the drafter in {draft.path} was trained for blocks of "
            f"{draft.block_size}, so at most {trained} are possible"
        )
    return wanted


def find_model(name: str, setting: str) -> Path:
    """A directory, or a hub id that the hub or its local cache has. Raises `CheckpointError`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{setting} is '{name}', which is a file; expected a model directory or a hub id")
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_id:
        raise CheckpointError(f"{setting} is '{name}', but there is no such directory; check the path")
    return _from_hub(name, setting)


def _from_hub(name: str, setting: str) -> Path:
    """Fetch a snapshot, only the files that we read; without the network, what the local cache has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{setting} is '{name}': no such directory, and the hub gave no model of that id ({reason}); "
            "check the name, or download the model and give its directory"
        ) from None


def read_draft(directory: Path) -> DraftSpec:
    """Read a drafter of any supported format. Raises `CheckpointError`."""
    config = JsonReader.load(directory / "config.json")
    if is_zlab(config):
        return read_zlab(directory, config)
    raise CheckpointError(
        f"{config.where}: architectures is {list(config.strings('architectures'))}; a drafter in the z-lab format has "
        "'DFlashDraftModel'"
    )


def check_pair(target: TargetSpec, draft: DraftSpec) -> None:
    """Check that a drafter was made for this target. Raises `CheckpointError` that names both."""
    both = f"the drafter in {draft.path} does not fit the target in {target.path}: "
    if draft.num_target_layers != target.decoder.num_layers:
        raise CheckpointError(
            f"{both}it was made for {draft.num_target_layers} target layers, the target has {target.decoder.num_layers}"
        )
    if max(draft.target_layer_ids) >= target.decoder.num_layers:
        raise CheckpointError(
            f"{both}target_layer_ids {list(draft.target_layer_ids)}, the target has layers 0 to "
            f"{target.decoder.num_layers - 1}"
        )
    if draft.decoder.hidden_size != target.decoder.hidden_size:
        raise CheckpointError(
            f"{both}hidden_size is {draft.decoder.hidden_size}, the target's is {target.decoder.hidden_size}, and the "
            "drafter uses the target's embedding"
        )
    if draft.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"{both}mask_token_id is {draft.mask_token_id}, the target's vocabulary has {target.vocab_size} tokens"
        )
