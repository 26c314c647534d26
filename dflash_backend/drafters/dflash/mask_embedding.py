"""`mask_embedding.pt`: the embedding of a drafter's mask token, where it was trained apart from the embedding table.

The one pickle that is ever read. `weights_only` keeps the unpickler to tensors and plain
containers, so nothing in the file is executed.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import first_line, shown

VECTOR_KEYS = ("embedding", "mask_embedding")
# Beyond the vector itself, at most 8 bytes for each number: pickle, archive, notes of the training script. Small enough
# that an archive which unpacks to a thousand times its size still fits.
MAX_EXTRA_BYTES = 256 * 1024


def load_mask_embedding(path: Path, mask_token_id: int, hidden_size: int) -> torch.Tensor:
    """The vector of the mask token, `[hidden_size]`, on the CPU in the file's own floating-point dtype.

    The file holds the tensor, `[hidden_size]` or `[1, hidden_size]`, or a dictionary with the tensor under `embedding`
    or `mask_embedding` and optionally `mask_token_id`. Raises `CheckpointError`.
    """
    limit = 8 * hidden_size + MAX_EXTRA_BYTES
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(
                f"{path} has {size} bytes; the vector of {hidden_size} numbers takes at most {limit}. A row of a "
                "table must be cloned before it is saved, or the whole table is"
            )
        with warnings.catch_warnings():
            # Of what it is about to refuse.
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    # For a file that is damaged or not torch's own: the unpickler interprets the bytes as instructions and fails
    # wherever they make no sense.
    except Exception as error:  # noqa: BLE001
        raise CheckpointError(
            f"{path} cannot be read: {first_line(error)}; {_expected(mask_token_id, hidden_size)}"
        ) from None
    vector = _vector(path, content, mask_token_id, hidden_size)
    if vector.shape not in ((hidden_size,), (1, hidden_size)):
        raise _wrong(path, f"a tensor of shape {list(vector.shape)}", mask_token_id, hidden_size)
    if not torch.isfinite(vector).all():
        raise _wrong(path, "numbers that are not finite", mask_token_id, hidden_size)
    return vector.detach().reshape(hidden_size).clone()


def _vector(path: Path, content: object, mask_token_id: int, hidden_size: int) -> torch.Tensor:
    """The tensor in what the file holds, dense, floating point and with its numbers in memory."""
    if isinstance(content, dict):
        found = content.get("mask_token_id", mask_token_id)
        if isinstance(found, torch.Tensor) and found.numel() == 1 and not found.is_meta:
            found = found.item()
        if type(found) is not int or found != mask_token_id:
            raise _wrong(path, f"a mask_token_id of {shown(found)}", mask_token_id, hidden_size)
        keys = [key for key in VECTOR_KEYS if key in content]
        if len(keys) != 1:
            names = ", ".join(shown(key) for key in list(content)[:8])
            raise _wrong(path, f"a dictionary with the keys {names or '(none)'}", mask_token_id, hidden_size)
        content = content[keys[0]]
    if not isinstance(content, torch.Tensor):
        raise _wrong(path, f"a value of type {type(content).__name__}", mask_token_id, hidden_size)
    if content.layout is not torch.strided or content.device.type != "cpu" or not content.is_floating_point():
        raise _wrong(path, f"a tensor of {content.dtype} ({content.layout})", mask_token_id, hidden_size)
    return content


def _expected(mask_token_id: int, hidden_size: int) -> str:
    return (
        f"expected a floating-point tensor of shape [{hidden_size}] or [1, {hidden_size}] written by torch.save, alone "
        f"or in a dictionary under {' or '.join(VECTOR_KEYS)}, with the config's mask_token_id ({mask_token_id}) if any"
    )


def _wrong(path: Path, found: str, mask_token_id: int, hidden_size: int) -> CheckpointError:
    return CheckpointError(f"{path} holds {found}; {_expected(mask_token_id, hidden_size)}")
