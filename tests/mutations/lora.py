"""Defects of LoRA adapters: how they are read, added, chosen and told apart."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

ENGINE = ("tests/models/test_lora.py",)
READING = ("tests/checkpoints/test_lora.py",)

LORA_MUTANTS = (
    *mutants_of(
        "dflash_backend/models/linear.py",
        ENGINE,
        ("a token has the numbers of all adapters", "ids[:, None] == self.owner", "ids[:, None] >= self.owner - 9"),
        ("the adapters' numbers lie one row off", "up[first:end, done : done + rank]", "up[first:end, :rank]"),
        ("rows of a product keep all rows of its adapters", "self.down, self.up.rows(index)", "self.down, self.up"),
        ("a pass leaves its adapters to the next one", "_adapter_ids.value = before", "pass"),
        ("threads share the adapters of a pass", "class _AdapterIds(threading.local)", "class _AdapterIds"),
        ("an endless number of another adapter comes through", "torch.where(ids", "(lambda a, b, c: a * b)(ids"),
    ),
    *mutants_of(
        "dflash_backend/models/decoder.py",
        ENGINE,
        (
            "a pass with adapters runs at once",
            "        if context.adapter_ids is None:\n            found",
            "        if True:\n            found",
        ),
        (
            "all passes run operation by operation",
            "plain: list[AnyLayerWeights] = [layer.without_adapters() for layer in weights.layers]",
            "plain: list[AnyLayerWeights] = list(weights.layers)",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/state.py",
        ENGINE,
        ("every request has the first adapter", "self._adapter_numbers[sampling.lora_name]", "1"),
        (
            "a request that ends leaves its adapter to be counted",
            "self.num_adapted -= bool",
            "self.num_adapted -= 0 * bool",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/batch.py",
        ENGINE,
        ("a step has no adapters", "adapted = requests.adapts_all or (", "adapted = False and ("),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        ENGINE,
        (
            "padded steps have no adapters",
            "sampled, model.drafter is not None and draft_width > 0, adapted=bool(model.target.adapter_names)",
            "sampled, model.drafter is not None and draft_width > 0",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/block_hashes.py",
        ENGINE,
        ("requests of all adapters share KV", "    if lora_name:", "    if False:"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/lora.py",
        READING,
        ("a rank-stabilised adapter has the scale of others", 'config.boolean("use_rslora", False)', "False"),
        ("all projections have the config's alpha", '_pattern(config, "alpha_pattern", module, ', "("),
        ("adapters of other models pass", "if left:", "if False:"),
        ("an unknown field passes", "if value and field not in _KNOWN and", "if False and"),
        ("towers of images are taken for the text", 'or module["before"] not in _BEFORE_LAYERS', ""),
        ("a digest is that of the config", "+ hashlib.file_digest(file, ", "+ (lambda *_: hashlib.sha256())(file, "),
    ),
    *mutants_of(
        "dflash_backend/text/request.py",
        ("tests/text/test_request.py",),
        ("an adapter that is not there is let pass", "if lora_name and lora_name not in ready.lora_names", "if False"),
    ),
    *mutants_of(
        "frontend/dflash_openai/sampling.py",
        ("tests/frontend/test_lora.py",),
        ("the model's name chooses no adapter", "if request.model in description.lora_names", "if False"),
    ),
    *mutants_of(
        "frontend/dflash_openai/triton_pool.py",
        ("tests/frontend/test_pool.py", "tests/frontend/test_lora.py"),
        ("a prefill server does not know the adapter", '("cache_salt", "lora_name", ', '("cache_salt", '),
    ),
    *mutants_of(
        "dflash_backend/engine/kv_tiers.py",
        ("tests/engine/test_kv_fingerprint.py",),
        ("KV of other adapters is found again", "adapter_directories(config).items()", "{}.items()"),
    ),
    *mutants_of(
        "dflash_backend/triton/running_requests.py",
        ("tests/triton/test_traffic.py",),
        ("answers of adapters are written down", "sampling.logit_bias or sampling.lora_name", "sampling.logit_bias"),
    ),
)
