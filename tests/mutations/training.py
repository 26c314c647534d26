"""Defects of training: a drafter that learns from what it will not have, or that goes on elsewhere than it stopped."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TRAINING = "dflash_backend/training"

TRAINING_MUTANTS = (
    *mutants_of(
        f"{TRAINING}/network.py",
        ("tests/demo/test_kinds.py", "tests/demo/test_training.py"),
        (
            "a block sees the feature at its anchor",
            "context = (key >= self.anchors[..., None])",
            "context = (key > self.anchors[..., None])",
        ),
    ),
    *mutants_of(
        f"{TRAINING}/loss.py",
        ("tests/training/test_loss.py",),
        (
            "drafts behind a token that cannot be drafted count",
            "counts[..., 1:] & can_draft[labels[..., 1:]]",
            "counts[..., 1:]",
        ),
        (
            "each draft weighs the same",
            "return DraftBatch(tokens, anchor_positions, labels, inside * falling)",
            "return DraftBatch(tokens, anchor_positions, labels, inside)",
        ),
        (
            "gradients of a table are those of the last rows",
            "found[index] += (change * weights[part])",
            "found[index] = (change * weights[part])",
        ),
        ("each row's gradient weighs the same", "(slope * weights).to(slope.dtype)", "slope"),
        (
            "a soft label has the whole weight beside its token",
            "        of_right = 1 - share\n",
            "        of_right = 1\n",
        ),
        (
            "soft labels are of temperature 1",
            "torch.softmax(logits / self.distillation.temperature, dim=-1)",
            "torch.softmax(logits, dim=-1)",
        ),
    ),
    *mutants_of(
        f"{TRAINING}/dspark.py",
        ("tests/training/test_loss.py",),
        ("a draft's bias is that of its own token", "markov_w1(labels[..., :-1])", "markov_w1(labels[..., 1:])"),
    ),
    *mutants_of(
        f"{TRAINING}/loop.py",
        ("tests/training/test_run.py",),
        ("moments begin anew", '        self.optimizer.restore(state["optimizer"])\n', ""),
        (
            "the order of a run that goes on begins anew",
            "divmod(index, len(self._batches))",
            "divmod(len(self._kept), len(self._batches))",
        ),
        ("a checkpoint is written in place of the one before", 'path.with_name(f"{path.name}.partial")', "path"),
    ),
    *mutants_of(
        f"{TRAINING}/loop.py",
        ("tests/training/test_start.py",),
        (
            "a draft's state is that of its own token",
            "behind = anchors[..., None] + torch.arange(",
            "behind = 1 + anchors[..., None] + torch.arange(",
        ),
    ),
    *mutants_of(
        f"{TRAINING}/features.py",
        ("tests/training/test_start.py",),
        ("rows share their blocks", "reshape(len(rows), width)\n", "reshape(len(rows), width) * 0\n"),
    ),
    *mutants_of(
        f"{TRAINING}/data.py",
        ("tests/training/test_data.py",),
        ("half a line stays", "                os.truncate(path, len(text) + len(newline))", "                pass"),
        ("held-out prompts are trained on", "trained = fresh[held:]", "trained = fresh"),
        ("recorded answers are made anew", "if not prompt.answer]", "]"),
        (
            "a run that goes on asks for the questions of before",
            "self.num_rounds = int((folder / ROUNDS).read_text())",
            "self.num_rounds = 0",
        ),
        ("answers take longer than they may", "            self._check_time()\n\n        is_last", "\n        is_last"),
        ("others read what people wrote", "os.open(name, flags, 0o600)", "os.open(name, flags, 0o644)"),
    ),
    *mutants_of(
        f"{TRAINING}/prompts.py",
        ("tests/training/test_data.py",),
        (
            "a question's first tokens are as cool as the rest",
            '"temperature": 1.0, "max_tokens": OPENING',
            '"temperature": 0.7, "max_tokens": OPENING',
        ),
        (
            "a whole question is continued",
            '[] if opening.finish_reason == "stop" else',
            "[] if not opening.token_ids else",
        ),
        ("answers that end are taken for loops", 'return finish_reason == "length" and len', "return len"),
        (
            "the first rows of a large file",
            "(other := chance.randrange(number + 1)) < most",
            "(other := number) < most",
        ),
    ),
    *mutants_of(
        f"{TRAINING}/run.py",
        ("tests/training/test_run.py",),
        (
            "what is worse than the drafter before is published",
            'if found["acceptance_length"] > self.record.published:',
            "if True:",
        ),
        (
            "an evaluation counts before it is done",
            "        stops = False\n",
            "        stops = False\n        trainer.progress.evaluated = trainer.progress.step\n",
        ),
        ("each process decides alone", "return bool(self._agree(stops))", "return stops"),
        (
            "the last layer is read before the norm",
            "return captured_layers(spec, self.spec.decoder.num_layers)",
            "return spec.target_layer_ids",
        ),
        ("embeddings of DSpark are scaled", "self.form == ZLAB and kind in (DFLASH, DFLASH2)", "self.form == ZLAB"),
        ("prompts take all positions", 'self._settings()["max_model_len"] - 2)', "10**9)"),
        ("samples that are gone are not missed", "if len(samples) < wanted:", "if not wanted:"),
        ("a drafter that it began with ends a run", 'if each["step"] > 0]', "]"),
    ),
    *mutants_of(
        f"{TRAINING}/sizes.py",
        ("tests/training/test_run.py",),
        ("each process takes all memory", "* 1024 // processes", "* 1024"),
    ),
    *mutants_of(
        "dflash_backend/triton/drafter_swaps.py",
        ("tests/triton/test_drafter_swaps.py",),
        (
            "a drafter that is not compared is taken back",
            'if said.outcome == "swapped" and waiting.wanted.window:',
            'if said.outcome == "swapped":',
        ),
    ),
    *mutants_of(
        f"{TRAINING}/loop.py",
        ("tests/training/test_run.py",),
        (
            "an evaluation that was interrupted is left out",
            "progress.step - progress.evaluated >= schedule.evaluate_every()",
            "progress.step != step and progress.step % schedule.evaluate_every() == 0",
        ),
    ),
    *mutants_of(
        f"{TRAINING}/formats.py",
        ("tests/training/test_start.py",),
        (
            "layers are named as other libraries do not count",
            "[i + 1 for i in config.target_layer_ids]",
            "[i for i in config.target_layer_ids]",
        ),
    ),
    *mutants_of(
        "dflash_backend/traffic.py",
        ("tests/engine/test_traffic.py",),
        ("a half line of a full disk stays", "            os.ftruncate(file, size)\n", "            pass\n"),
        ("a half line is read", 'path.read_bytes().rpartition(b"\\n")[0].split', "path.read_bytes().rstrip().split"),
        (
            "answers of a fine-tune's original are its own",
            "tuple(row.answer) if header.target == own",
            "tuple(row.answer) if own",
        ),
        (
            "files grow past the bound",
            "                path.unlink(missing_ok=True)\n                total -= size",
            "                total -= size",
        ),
        ("a full disk is tried with each row", "time.monotonic() < self._retry_at", "time.monotonic() < 0"),
        ("anybody reads what users wrote", "os.O_CLOEXEC, 0o600", "os.O_CLOEXEC, 0o644"),
    ),
    *mutants_of(
        "dflash_backend/triton/running_requests.py",
        ("tests/triton/test_traffic.py",),
        ("who refuses is written down", "return sampling.record_traffic and not", "return not"),
        ("salted requests are written down", "and not sampling.cache_salt and not changed", "and not changed"),
    ),
)
