"""A whole run: a target in, a drafter in a folder out.

`OUT/config.json` and `OUT/model.safetensors` are the best drafter so far, `OUT/train.json` and `OUT/train.png` say how
it came about. `OUT/training/` has what a run goes on from: the data, in a folder for each target and options, and the
last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.config import EngineConfig
from dflash_backend.cores import usable_cores
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.drafter import captured_layers
from dflash_backend.drafters.registry import read_draft
from dflash_backend.drafters.resolve import resolve_target_dir
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.engine.llm import LLM, RequestError
from dflash_backend.error_text import first_line
from dflash_backend.text.chat import PromptError
from dflash_backend.text.sampling_defaults import read_sampling_defaults
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.training.acceptance import measure_acceptance
from dflash_backend.training.data import DataOptions, Store, collect
from dflash_backend.training.errors import TrainingError
from dflash_backend.training.features import Teacher
from dflash_backend.training.formats import FORMATS, KINDS, SPECULATORS, ZLAB, Naming, make_drafter
from dflash_backend.training.loop import LoopOptions, Schedule, Trainer, run_steps, save_atomically
from dflash_backend.training.loss import Distillation
from dflash_backend.training.network import DFLASH, DFLASH2, EAGLE3, DrafterConfig, DraftModel, Tables
from dflash_backend.training.publish import Publication, plot, vocabulary_tensors, write_json
from dflash_backend.training.sizes import check_fits, free_bytes, memory_of
from dflash_backend.training.start import (
    Published,
    begin_from_target,
    default_config,
    draft_vocabulary,
    mask_token,
    read_published,
)

# Positions behind the longest row, for drafts.
SPARE_POSITIONS = 64
DATA_SHARE, LAST_SHARE = 0.4, 0.05
"""Of `minutes`: the most that making data takes, and what is left for the last evaluation."""
EVALUATIONS = 8
PATIENCE, BETTER = 4, 1.005
"""A run ends after this many evaluations that were no better than this times the best before them."""
NEW_RATE, FROM_RATE, RATE_WIDTH = 12e-3, 1e-3, 576
"""Learning rates for targets of up to `RATE_WIDTH` hidden numbers; of wider ones less, in proportion."""
SOFT_LABELS, HIDDEN_LOSS = 1.0, 2.0
FEWEST_STEPS = 20
KV_GIB = {"cpu": 1.0, "cuda": 4.0}
# Options that a run must have in common with the one that it goes on with, beside others of other names.
IDENTITY = (
    *("kind", "steps", "learning_rate", "decay", "soft_labels", "hidden_loss", "batch_tokens", "accumulate"),
    *("draft_vocab", "share_head", "bf16"),
)
# Sizes that one kind has and others have not, by the options that give them.
OF_EAGLE3 = {"eagle_drafts": "--drafts"}
NOT_OF_EAGLE3 = {"draft_layers": "--layers", "block_size": "--block-size", "mask_token_id": "--mask-token"}
# Settings of the engine that its answers and the target's features depend on.
NUMBER_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "batch_invariant", "rope_scaling")
STATE, CANDIDATE, SUMMARY, PLOT = "state.pt", "candidate", "train.json", "train.png"
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, OSError)
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainOptions:
    """What is asked of a run. `drafter`: fields of `DrafterConfig` that were given. settings: of the engine. Without
    `steps` there are as many as fit `minutes`; a temperature below 0 is the one that the checkpoint recommends; what is
    None follows from target and kind. kind, form: one of `KINDS` and of `FORMATS`; None: those of the drafter that
    training begins with, else DFlash and z-lab's."""

    target: str
    out: Path
    data: DataOptions
    kind: str | None = None
    form: str | None = None
    begin_from: Path | None = None
    minutes: float = 30.0
    steps: int | None = None
    evaluate_minutes: float | None = None
    learning_rate: float | None = None
    decay: float | None = None
    soft_labels: float | None = None
    hidden_loss: float | None = None
    batch_tokens: int | None = None
    accumulate: int = 1
    draft_vocab: int | None = None
    share_head: bool = False
    bf16: bool | None = None
    restart: bool = False
    drafter: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    """What `train.json` says beside options: evaluations, the acceptance length of the drafter that is published (0
    before any is), and seconds of each phase."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    published: float = 0.0
    data_seconds: float = 0.0
    ended: str = ""


def has_bf16(device: torch.device) -> bool:
    """Whether products of bf16 are fast on this device."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return " amx_bf16" in flags or " avx512_bf16" in flags


@contextlib.contextmanager
def processes() -> Iterator[bool]:
    """The processes that `torchrun` started, if it did. Gives whether this one speaks and writes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The first makes the data while the others wait.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(days=2))
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def train(options: TrainOptions, say: Say, data_report: Callable[[int, int], None]) -> dict[str, Any]:
    """Run it, or go on with it. Returns what `train.json` says, in
    processes that do not speak nothing. Raises `TrainingError`, `ConfigError` and
    `CheckpointError`; after Ctrl-C `KeyboardInterrupt`, with all that was done kept."""
    with processes() as speaks:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        try:
            return Run(options, say if speaks else lambda text: None, data_report, speaks).run()
        except (RequestError, ParameterError, PromptError) as error:
            raise TrainingError(str(error)) from None


class Run:
    """The parts of a run, in the order in which they happen."""

    def __init__(self, options: TrainOptions, say: Say, data_report: Callable[[int, int], None], speaks: bool) -> None:
        self.began = time.monotonic()
        self.options, self._say, self._data_report, self._speaks = options, say, data_report, speaks
        _check(options)
        config = EngineConfig.from_values({"target_model": options.target, **options.settings})
        directory = resolve_target_dir(config)
        self.spec: TargetSpec = read_target(directory, config.target_rope)
        if options.data.temperature < 0:
            defaults = read_sampling_defaults(directory)
            options = replace(options, data=replace(options.data, temperature=defaults.get("temperature", 0.0)))
        self.options = options
        self.form = options.form or ZLAB
        self.published: Published | None = None
        if options.begin_from is not None:
            self.published = read_published(options.begin_from, self.spec)
            if options.kind not in (None, self.published.config.drafter):
                raise TrainingError(
                    f"--kind is {options.kind}, and the drafter of --from is of the kind "
                    f"{self.published.config.drafter}; leave --kind out"
                )
        self.folder = options.out / "training"
        numbers = {name: str(options.settings[name]) for name in NUMBER_SETTINGS if name in options.settings}
        self.fingerprint = options.data.fingerprint(directory, numbers)
        if self.published is None:
            self._new_config(0)  # options that no drafter has are refused before anything is made
        self.record = Record()
        self._resumed = self._read_state()

    def run(self) -> dict[str, Any]:
        """All of it."""
        options = self.options
        llm = LLM(options.target, "", **self._settings(spare=True))
        teacher = Teacher(llm)
        store = Store(self.folder / f"data-{self.fingerprint}")
        self._collect(llm, store)
        tokenizer = llm.tokenizer
        del llm  # its KV; the target stays
        samples = store.samples
        if self._resumed is not None:
            wanted = self._resumed["num_samples"]
            if len(samples) < wanted:
                raise TrainingError(
                    f"{store.folder} has {len(samples):,} samples, and the run that is to go on has {wanted:,}: some "
                    "were taken away; add --restart to train anew, from what is there and more"
                )
            samples = samples[:wanted]
        config, draft, tables, publication = self._drafter(teacher, tokenizer, [sample.answer for sample in samples])
        loop = self._loop_options(teacher.device, config, tables)
        if options.hidden_loss and tables.target_head is not None:
            raise TrainingError(
                "--hidden-loss is for drafters with the target's LM head; the one of --from has its own"
            )
        memory, free = memory_of(config, draft, tables, loop), free_bytes(teacher.device)
        num_weights = sum(parameter.numel() for parameter in draft.parameters())
        self._say(
            f"{config.drafter} drafter of {num_weights:,} weights: {config.draft_layers} layers, target layers "
            f"{list(config.target_layer_ids)}, {config.num_drafts} drafts, {config.num_draft_tokens:,} tokens; {memory}"
        )
        check_fits(memory, free)
        loop = replace(loop, feature_bytes=max(0, int((free - memory.total) * 0.5)))
        can_draft = None
        if tables.draft_ids is not None:
            can_draft = torch.zeros(self.spec.vocab_size, dtype=torch.bool)
            can_draft[draft_tokens_of(publication.tensors["d2t"])] = True
        trainer = Trainer(draft, teacher, tables, samples, self._capture(draft, publication), loop, can_draft)
        by_time = options.evaluate_minutes is not None or (options.steps is None and self._resumed is None)
        seconds = self._agree(trainer.seconds_of_a_step() if by_time else 0.0)
        trainer.options = replace(loop, steps=self._num_steps(trainer, seconds))
        if self._resumed is not None:
            trainer.restore(self._resumed["trainer"])
            done, steps = trainer.progress.step, trainer.options.steps
            self._say(f"going on behind step {done:,} of {steps:,}")
            if done >= steps:
                self._say(
                    f"all are done: --restart trains anew, --from {options.out} with another --out trains further"
                )
        return self._train(trainer, teacher, store, publication, seconds)

    def _settings(self, spare: bool = False) -> dict[str, Any]:
        """The engine's: rows of prompt and answer, and where spare positions for drafts behind them."""
        data = self.options.data
        longest = min(data.max_prompt + data.max_answer, self.spec.decoder.max_len - SPARE_POSITIONS)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own = {"max_model_len": longest + (SPARE_POSITIONS if spare else 0), "kv_cache_gb": KV_GIB[device]}
        return {"enable_cuda_graphs": False, "max_num_seqs": 64, **own, **self.options.settings}

    def _collect(self, llm: LLM, store: Store) -> None:
        options, began = self.options, time.monotonic()
        if self._resumed is None and self._speaks:
            deadline = None if options.steps is not None else self.began + 60 * DATA_SHARE * options.minutes
            had = store.num_tokens
            if had < options.data.num_tokens:
                what = (
                    "prompts are read, and answered"
                    if options.data.files
                    else "the target writes questions and answers"
                )
                if options.data.traffic is not None:
                    what = "prompts are read with this target's answers; the others are answered"
                self._say(f"{what} at temperature {options.data.temperature:g}")
                # Held-out prompts are answered with fewer positions than there are here.
                longest = min(options.data.max_prompt, self._settings()["max_model_len"] - 2)
                collect(llm, store, replace(options.data, max_prompt=longest), self._data_report, deadline)
            seconds = time.monotonic() - began
            self.record.data_seconds += seconds
            new = store.num_tokens - had
            rate = f", {new / seconds:,.0f} tokens/s" if new and seconds else ""
            self._say(
                f"{len(store.samples):,} samples with {store.num_tokens:,} tokens of answers, "
                f"{len(store.held_out)} held-out prompts{rate}"
            )
        if dist.is_initialized():
            dist.barrier()
            if not self._speaks:
                store.__init__(store.folder)  # type: ignore[misc]

    def _drafter(
        self, teacher: Teacher, tokenizer: Any, answers: list[tuple[int, ...]]
    ) -> tuple[DrafterConfig, DraftModel, Tables, Publication]:
        """The drafter before training, what it takes from the target, and how it is written."""
        options, published = self.options, self.published
        torch.manual_seed(options.data.seed)
        dtype = torch.bfloat16 if self._bf16(teacher.device) else torch.float32
        ends = tokenizer.eos_token_ids
        special = {"eos_token_id": ends[0]} if ends else {}
        naming = Naming(str(self.spec.path.resolve()), (self.spec.architecture,), special)
        if published is not None:
            tables = self._published_tables(published, teacher, dtype)
            draft = make_drafter(published.config)
            published.load(draft)
            fields, tensors = published.fields, published.tensors
            return published.config, draft, tables, Publication(published.config, self.form, naming, fields, tensors)
        kind = options.kind or DFLASH
        # As each kind's reader says: the authors of DFlash take embeddings as the target's first layer reads them.
        scaled = self.form == ZLAB and kind in (DFLASH, DFLASH2)
        whole = teacher.tables(dtype, scaled, draft_tokens=None)
        config = self._new_config(mask_token(tokenizer, whole.embedding))
        tokens = draft_vocabulary(answers, options.draft_vocab or self.spec.vocab_size, self.spec.vocab_size)
        if tokens is not None:
            whole = teacher.tables(dtype, scaled, draft_tokens=tokens)
            config = replace(config, draft_vocab_size=len(tokens))
        head = None if options.share_head else whole.head
        tensors = vocabulary_tensors(tokens, head, self.spec.vocab_size, self.form)
        draft = make_drafter(config)
        begin_from_target(draft, self.spec)
        return config, draft, whole, Publication(config, self.form, naming, None, tensors)

    @staticmethod
    def _published_tables(published: Published, teacher: Teacher, dtype: torch.dtype) -> Tables:
        """The checkpoint's own embedding and head where it ships them."""
        tokens, shipped = None, published.tensors
        if published.config.draft_vocab_size is not None:
            tokens = draft_tokens_of(shipped["d2t"])
        tables = teacher.tables(dtype, published.spec.scales_embedding, tokens)
        if "embed_tokens.weight" in shipped:
            tables = replace(tables, embedding=shipped["embed_tokens.weight"].to(teacher.device, dtype))
        if "lm_head.weight" in shipped:
            own = shipped["lm_head.weight"].to(teacher.device, dtype)
            if not torch.equal(own, tables.head):
                tables = replace(tables, head=own, target_head=tables.head)
        return tables

    def _new_config(self, mask_token_id: int) -> DrafterConfig:
        """Of a new drafter; mask_token_id: where none was given. Raises `TrainingError`."""
        given = {"mask_token_id": mask_token_id, **self.options.drafter}
        return default_config(self.spec, self.options.kind or DFLASH, **given)

    def _capture(self, draft: DraftModel, publication: Publication) -> tuple[int, ...]:
        """The target's layers that the engine will capture for this drafter, by its own reader."""
        candidate = self.folder / CANDIDATE
        if self._speaks:
            publication.write(draft, candidate)
        self._agree(None)
        spec = read_draft(candidate).for_target(self.spec)
        assert isinstance(spec, DraftModelSpec)
        if isinstance(spec, DFlashSpec):
            return captured_layers(spec, self.spec.decoder.num_layers)
        return spec.target_layer_ids

    def _bf16(self, device: torch.device) -> bool:
        return has_bf16(device) if self.options.bf16 is None else self.options.bf16

    def _loop_options(self, device: torch.device, config: DrafterConfig, tables: Tables) -> LoopOptions:
        options = self.options
        narrow = min(1.0, RATE_WIDTH / config.shape.hidden_size)
        rate = options.learning_rate or narrow * (NEW_RATE if options.begin_from is None else FROM_RATE)
        tokens = options.batch_tokens or (2048 if device.type == "cpu" else 16384)
        seed, bf16 = options.data.seed, self._bf16(device)
        soft, hidden, distillation = options.soft_labels, options.hidden_loss, None
        if soft is None:
            soft = SOFT_LABELS
        if hidden is None:  # measured for this kind; its logits are those of its states by the target's head
            hidden = HIDDEN_LOSS if config.drafter == DFLASH and tables.target_head is None else 0.0
        if soft or hidden:
            distillation = Distillation(soft, options.data.temperature or 1.0, hidden)
        return LoopOptions(
            1, rate, tokens, options.accumulate, seed, bf16, decay=options.decay, distillation=distillation
        )

    def _num_steps(self, trainer: Trainer, seconds: float) -> int:
        """How many steps there are: as asked, as before, or as many as fit the time that is left."""
        options = self.options
        if self._resumed is not None:
            return int(self._resumed["steps"])
        if options.steps is not None:
            return options.steps
        left = 60 * options.minutes * (1 - LAST_SHARE * 2) - (time.monotonic() - self.began)
        steps = self._agree(max(FEWEST_STEPS, int(left / seconds)))
        self._say(f"a step takes {seconds:.2f} s: {steps:,} steps in about {steps * seconds / 60:.1f} minutes")
        return steps

    @staticmethod
    def _agree(value: Any) -> Any:
        """What the first process has: clocks and records are each one's own."""
        if not dist.is_initialized():
            return value
        shared = [value]
        dist.broadcast_object_list(shared)
        return shared[0]

    def _train(
        self, trainer: Trainer, teacher: Teacher, store: Store, publication: Publication, seconds: float
    ) -> dict[str, Any]:
        """seconds: of a step, as they were measured."""
        options, fixed = self.options, 0
        if options.evaluate_minutes is not None:
            fixed = max(1, round(60 * options.evaluate_minutes / seconds))
        evaluate = partial(self._evaluate, trainer, teacher, store, publication)
        if self.published is not None and self._resumed is None:
            evaluate()  # what training has to better

        def report() -> None:
            progress, steps = trainer.progress, trainer.options.steps
            rate = progress.tokens / max(progress.seconds, 1e-9)
            left = (steps - progress.step) * progress.seconds / max(1, progress.step)
            self._say(
                f"step {progress.step:,} of {steps:,}, loss {progress.loss:.3f}, {rate:,.0f} drafts/s, "
                f"about {left / 60:.1f} min left"
            )

        schedule = Schedule(
            partial(self._save, trainer),
            report,
            evaluate,
            lambda: fixed or max(1, trainer.options.steps // EVALUATIONS),
            max(1, min(100, trainer.options.steps // 20)),
        )
        alone = not dist.is_initialized() and options.steps is None
        deadline = self.began + 60 * options.minutes * (1 - LAST_SHARE) if alone else None
        self.record.ended = run_steps(trainer, schedule, deadline)
        if trainer.progress.evaluated != trainer.progress.step:
            evaluate()
        return self._finish(trainer, store)

    def _evaluate(self, trainer: Trainer, teacher: Teacher, store: Store, publication: Publication) -> bool:
        """Measure the drafter, publish it if it is the best, and save the state. Returns whether the run is to end.

        One that is interrupted leaves record and progress as they were, so that it is done again."""
        stops = False
        if self._speaks:
            candidate = self.folder / CANDIDATE
            publication.write(trainer.draft, candidate)
            found = self._measure(trainer.progress.step, candidate, teacher, store)
            if found["acceptance_length"] > self.record.published:
                publication.write(trainer.draft, self.options.out)
                self.record.published = found["acceptance_length"]
            self.record.evaluations.append(found)
            stops = self.options.steps is None and self.is_plateau()
        trainer.progress.evaluated = trainer.progress.step
        self._save(trainer)
        return bool(self._agree(stops))

    def is_plateau(self) -> bool:
        """Whether the last evaluations were no better than those before; that of a drafter as training found it, which
        the first steps may harm, does not count."""
        lengths = [each["acceptance_length"] for each in self.record.evaluations if each["step"] > 0]
        return len(lengths) > PATIENCE and max(lengths[-PATIENCE:]) <= BETTER * max(lengths[:-PATIENCE])

    def _measure(self, step: int, drafter: Path, teacher: Teacher, store: Store) -> dict[str, Any]:
        temperature = self.options.data.temperature
        length, speed = measure_acceptance(
            self.options.target, drafter, store.held_out, temperature, self._settings(), teacher
        )
        which = "the drafter it begins with" if step == 0 else f"step {step:,}"
        self._say(f"{which}: acceptance length {length:.2f} on {len(store.held_out)} held-out prompts")
        return {
            "step": step,
            "minutes": round((time.monotonic() - self.began) / 60, 2),
            "acceptance_length": round(length, 4),
            "tokens_per_second": round(speed, 1),
        }

    def _identity(self) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on with."""
        options = self.options
        return {
            "data": self.fingerprint,
            "--format": options.form,
            "--from": None if options.begin_from is None else str(options.begin_from),
            **{f"--{name.replace('_', '-')}": getattr(options, name) for name in IDENTITY},
            "--tokens": options.data.num_tokens,
            "--seed": options.data.seed,
            "sizes": {name: str(value) for name, value in sorted(options.drafter.items())},
        }

    def _save(self, trainer: Trainer) -> None:
        if not self._speaks:
            return
        state = {
            "identity": self._identity(),
            "trainer": trainer.state(),
            "steps": trainer.options.steps,
            "num_samples": len(trainer.samples),
            "record": asdict(self.record),
        }
        save_atomically(self.folder / STATE, lambda path: torch.save(state, path))

    def _read_state(self) -> dict[str, Any] | None:
        """The state that this run goes on from. Raises `TrainingError` for one of other options, or a damaged one."""
        path = self.folder / STATE
        if self.options.restart or not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            identity = state["identity"]
        except UNREADABLE as error:
            why = first_line(error).partition(". ")[0]
            raise TrainingError(
                f"{path} is damaged ({why}); add --restart to train anew from the data that is there"
            ) from None
        own = self._identity()
        other = [name for name, value in own.items() if identity.get(name) != value]
        if other:
            name = other[0]
            raise TrainingError(
                f"{self.options.out} has a run with other options: {name} was {identity.get(name)} and is {own[name]}; "
                "take the options of that run, another --out, or --restart"
            )
        self.record = Record(**state["record"])
        return state

    def _finish(self, trainer: Trainer, store: Store) -> dict[str, Any]:
        record, progress, options = self.record, trainer.progress, self.options
        summary = {
            "target": options.target,
            "kind": trainer.draft.config.drafter,
            "format": self.form if self.published is None else self.published.spec.format,
            "from": None if options.begin_from is None else str(options.begin_from),
            "weights": sum(parameter.numel() for parameter in trainer.draft.parameters()),
            "num_drafts": trainer.draft.config.num_drafts,
            "target_layer_ids": list(trainer.draft.config.target_layer_ids),
            "samples": len(trainer.samples),
            "answer_tokens": sum(len(sample.answer) for sample in trainer.samples),
            "temperature": options.data.temperature,
            "held_out": len(store.held_out),
            "data_seconds": round(record.data_seconds, 1),
            "training_seconds": round(progress.seconds, 1),
            "steps": progress.step,
            "ended": record.ended,
            "acceptance_length": record.published,
            "evaluations": record.evaluations,
            "losses": [[step, round(loss, 4)] for step, loss in progress.losses],
        }
        if self._speaks:
            write_json(options.out / SUMMARY, summary)
            title = f"{summary['kind']} drafter for {self.spec.path.name}: acceptance length {record.published:.2f}"
            if not plot(options.out / PLOT, progress.losses, record.evaluations, title):
                self._say("matplotlib is not installed: no plot is drawn")
        return summary if self._speaks else {}


def draft_tokens_of(offsets: Tensor) -> Tensor:
    """The tokens that a drafter with the map `d2t` (`[draft vocab]`) can propose, by their draft ids: int64."""
    return offsets.long() + torch.arange(len(offsets))


def _check(options: TrainOptions) -> None:
    """Raise `TrainingError` for options that contradict each other, and for a folder of something else."""
    if options.kind not in (None, *KINDS) or options.form not in (None, *FORMATS):
        raise TrainingError(f"--kind is one of {', '.join(KINDS)}, --format one of {', '.join(FORMATS)}")
    out = options.out
    if out.is_file():
        raise TrainingError(f"--out {out} is a file; name a folder")
    if (out / "config.json").exists() and not (out / "training").is_dir():
        raise TrainingError(f"--out {out} holds a model that no training wrote; name another folder")
    if options.begin_from is not None and any((options.drafter, options.draft_vocab, options.form, options.share_head)):
        raise TrainingError(
            "--from keeps the format and the sizes of its drafter; leave --format, --layers, --intermediate-size, "
            "--layer-ids, --block-size, --drafts, --mask-token, --draft-vocab and --share-head out"
        )
    kind = options.kind or DFLASH
    for name, option in NOT_OF_EAGLE3.items() if kind == EAGLE3 else OF_EAGLE3.items():
        if name in options.drafter:
            raise TrainingError(f"{option} is not for drafters of the kind {kind}; leave it out")
    if kind == DFLASH2 and options.draft_vocab:
        raise TrainingError("a dflash2 drafter proposes any token; leave --draft-vocab out")
    if options.soft_labels is not None and options.soft_labels > 1:
        raise TrainingError(f"--soft-labels is {options.soft_labels:g}; expected a share from 0 to 1")
    if options.share_head and not options.draft_vocab:
        raise TrainingError("--share-head is for a --draft-vocab: without one the target's LM head is shared anyway")
    if options.share_head and options.form == SPECULATORS:
        raise TrainingError("--share-head is not for --format speculators, which other engines read with its LM head")
