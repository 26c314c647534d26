"""Prompts and answers: what is read, what the target writes, what is kept, and what is said of what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.engine.llm import RequestOutput
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.traffic import Row, TrafficWriter
from dflash_backend.training import data
from dflash_backend.training import prompts as prompts_module
from dflash_backend.training.data import DataOptions, Sample, Store, collect
from dflash_backend.training.errors import TrainingError
from dflash_backend.training.prompts import (
    MAX_QUESTION_TOKENS,
    OPENING_TOKENS,
    TEMPERATURES,
    QuestionWriter,
    is_loop,
    is_usable,
    read_prompts,
)

QUESTIONS = ["What is 2 + 3?", "Count from 3 to 6.", "What is the capital of Norway?", "Name two colours.", "Hello!"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(draft="", max_model_len=512, kv_cache_gb=0.1, max_num_seqs=32)


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_of_each_form_become_prompts(llm: LLM, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello!"}]
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Bye"}]
    file = write_rows(
        tmp_path / "rows.jsonl",
        {"messages": [*chat, {"role": "assistant", "content": "its answer is not used"}]},
        {"messages": chat},
        {"prompt": "2 + 3 = "},
        {"conversations": shared},
        {"prompt": "x " * 400},
    )
    found = {prompt.text: list(prompt.token_ids) for prompt in read_prompts([file], llm.tokenizer, {}, 100, 0, 100)}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    expected = [
        llm.tokenizer.apply_chat_template(chat),
        llm.tokenizer.encode("2 + 3 = "),
        llm.tokenizer.apply_chat_template([*turns, {"role": "user", "content": "Bye"}]),
    ]
    assert sorted(found.values()) == sorted(expected)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [}', "line 2: this is not JSON"),
        ("[1]", "line 2: this is list; expected a JSON object"),
        ('{"messages": "hello"}', "line 2: field 'messages' is \"hello\""),
        ('{"question": "?"}', "line 2: field 'messages' is missing"),
        ('{"messages": [{"role": "user"}]}', "line 2: field 'messages'"),
        ('{"conversations": [{"from": "nobody", "value": "x"}]}', '"from" as one of human'),
        ('{"prompt": 3}', "line 2: field 'prompt' is 3; expected text"),
        ('{"messages": [{"role": "user\\u0000", "content": "x"}]}', "line 2"),
    ],
)
def test_a_damaged_row_is_named(llm: LLM, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(TrainingError) as error:
        read_prompts([file], llm.tokenizer, {}, 100, 0, 100)
    assert said in str(error.value)


def test_a_chat_needs_a_template(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    chat = {"messages": [{"role": "user", "content": "Hello!"}]}
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "2 + 3 ="}, chat)
    with pytest.raises(
        TrainingError, match=r"rows.jsonl, line 2: .* has no chat template, and the row is a chat; give"
    ):
        read_prompts([file], llm.tokenizer, {}, 100, 0, 100)
    assert len(read_prompts([write_rows(file, {"prompt": "2 + 3 ="})], llm.tokenizer, {}, 100, 0, 100)) == 1


def test_a_missing_or_empty_file_is_named(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none.jsonl cannot be read: No such file"):
        read_prompts([tmp_path / "none.jsonl"], llm.tokenizer, {}, 100, 0, 100)
    file = write_rows(tmp_path / "long.jsonl", {"prompt": "x " * 400})
    with pytest.raises(TrainingError, match=r"all 1 prompts have more than 20 tokens"):
        read_prompts([file], llm.tokenizer, {}, 20, 0, 100)


def test_the_target_writes_questions_in_its_users_place(llm: LLM) -> None:
    writer = QuestionWriter(llm, {})
    found = writer.write(6, 3)
    assert len(found) >= 3
    for prompt in found:
        assert prompt.text.startswith("<|im_start|>user\n")
        assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert prompt.text.count("<|im_start|>") == 2
        assert list(prompt.token_ids) == llm.tokenizer.encode(prompt.text)
    assert len({prompt.text for prompt in found}) == len(found)
    assert writer.write(6, 3) == []  # each is known by now


def test_a_question_begins_as_often_as_the_target_has_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first tokens are drawn at temperature 1, what follows is cooler; one that is whole by then begins anew."""
    asked: list[tuple[list[list[int]], list[dict[str, Any]], list[RequestOutput]]] = []
    generate = llm.generate

    def noted(prompts: list[list[int]], params: list[dict[str, Any]], *given: Any) -> list[RequestOutput]:
        outputs = generate(prompts, params, *given)
        asked.append((prompts, params, outputs))
        return outputs

    monkeypatch.setattr(llm, "generate", noted)
    monkeypatch.setattr(prompts_module, "OPENING_TOKENS", 12)
    writer = QuestionWriter(llm, {})
    found = writer.write(24, 3)
    (starts, first, openings), (prompts, rest, questions) = asked
    assert {each["temperature"] for each in first} == {1.0}
    assert {each["temperature"] for each in rest} == set(TEMPERATURES)
    whole = [opening.finish_reason == "stop" for opening in openings]
    assert any(whole)
    for start, opening, is_whole, prompt in zip(starts, openings, whole, prompts, strict=True):
        assert prompt == start + ([] if is_whole else opening.token_ids)
    texts = {
        llm.tokenizer.decode(prompt[len(starts[0]) :]) + question.text
        for prompt, question in zip(prompts, questions, strict=True)
    }
    assert found
    for each in found:
        assert any(text.strip() in each.text for text in texts)


def test_answers_that_only_repeat_themselves_are_left_out(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_loop([7, 8] * 20, "length")
    assert not is_loop([7, 8] * 20, "stop")
    assert not is_loop([7, 8] * 4, "length")
    assert not is_loop(range(40), "length")
    rows = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    options = DataOptions(10_000, max_answer=3, files=(write_rows(tmp_path / "rows.jsonl", *rows),))
    store = Store(tmp_path / "data")
    monkeypatch.setattr(data, "is_loop", lambda ids, reason: reason == "length")
    with pytest.raises(TrainingError, match="too few prompts: 0 samples and 4 held-out"):
        collect(llm, store, options, lambda done, total: None)


def test_without_a_chat_template_it_writes_texts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer._template, "chat_template", None)
    found = QuestionWriter(llm, {}).write(4, 0)
    assert found
    assert all(prompt.token_ids[0] in llm.tokenizer.eos_token_ids for prompt in found)
    assert all(9 <= len(prompt.token_ids) <= 49 for prompt in found)


def test_a_template_that_hides_the_users_turn_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer._template, "chat_template", "always the same")
    with pytest.raises(TrainingError, match=r"prints a user's message 0 times; give prompts by --data"):
        QuestionWriter(llm, {})


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("What is 2 + 3?", True),
        ("Übersetze „Haus“ ins Japanische: 家", True),
        ("?! ...", False),
        ("broken \ufffd text", False),
        ("again and again " * 8, False),
        ("one два 三 четыре", False),
    ],
)
def test_texts_that_make_no_prompt_are_left_out(text: str, usable: bool) -> None:
    assert is_usable(text, 10) is usable


def test_answers_are_the_targets_own_and_held_out_prompts_have_none(llm: LLM, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    options = DataOptions(10_000, max_answer=12, files=(write_rows(tmp_path / "rows.jsonl", *rows),))
    store = Store(tmp_path / "data")
    collect(llm, store, options, lambda done, total: None)
    prompts = [sample.prompt for sample in store.samples]
    assert (len(store.held_out), len(prompts)) == (4, 1)
    assert not set(prompts) & set(store.held_out)
    for sample in store.samples:
        expected = llm.generate([list(sample.prompt)], max_tokens=12, temperature=0)[0]
        assert list(sample.answer) == expected.token_ids
    again = Store(tmp_path / "data")
    assert (again.samples, again.held_out) == (store.samples, store.held_out)


def test_questions_are_written_beside_the_answers_to_those_before(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is that of its own question, each question is written once, and none for a round that does not
    come."""
    monkeypatch.setattr(data, "ROUND", 8)
    calls: list[tuple[int, int]] = []
    openings: list[int] = []
    generate = llm.generate

    def counted(prompts: list[list[int]], params: list[dict[str, Any]], *given: Any, **more: Any) -> Any:
        lengths = [each["max_tokens"] for each in params]
        if set(lengths) == {OPENING_TOKENS}:
            openings.append(len(lengths))
        else:
            num_questions = lengths.count(MAX_QUESTION_TOKENS)
            calls.append((len(lengths) - num_questions, num_questions))
        return generate(prompts, params, *given, **more)

    monkeypatch.setattr(llm, "generate", counted)
    store = Store(tmp_path / "data")
    monkeypatch.setattr(data, "MOST_HELD_OUT", 4)
    collect(llm, store, DataOptions(150, max_answer=12, seed=5), lambda done, total: None)
    monkeypatch.undo()
    assert calls[0] == (0, 8)
    assert all(num_answers for num_answers, _ in calls[1:])
    assert [num_questions for _, num_questions in calls[1:]] == [8] * (len(calls) - 2) + [0]
    assert len(calls) > 3
    assert openings == [8] * (len(calls) - 1)
    prompts = [sample.prompt for sample in store.samples]
    assert len(set(prompts) | set(store.held_out)) == len(prompts) + 4
    for sample in store.samples:
        expected = llm.generate([list(sample.prompt)], max_tokens=12, temperature=0)[0]
        assert list(sample.answer) == expected.token_ids


def test_questions_go_on_where_the_run_before_stopped(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By other seeds, also where most of what was written was of no use: the same seeds give the same questions."""
    monkeypatch.setattr(data, "ROUND", 8)
    monkeypatch.setattr(data, "MOST_HELD_OUT", 4)
    seeds: list[set[int]] = []
    requests = QuestionWriter.requests

    def noted(self: QuestionWriter, count: int, seed: int) -> Any:
        prompts, params = requests(self, count, seed)
        seeds.append({each["seed"] for each in params})
        return prompts, params

    monkeypatch.setattr(QuestionWriter, "requests", noted)
    for tokens in (100, 300):
        collect(llm, Store(tmp_path / "data"), DataOptions(tokens, max_answer=12, seed=5), lambda done, total: None)
    assert len(seeds) == Store(tmp_path / "data").num_rounds > 2
    assert len(set().union(*seeds)) == 8 * len(seeds)
    (tmp_path / "data" / "rounds").write_text("x")
    assert Store(tmp_path / "data").num_rounds == 0


def test_answers_end_with_the_time_that_they_may_take(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a round; those that had ended are kept, and nothing of the others stays in the engine."""
    rows = [{"prompt": f"{number} + 3 = "} for number in range(60)]
    options = DataOptions(10_000, max_answer=12, files=(write_rows(tmp_path / "rows.jsonl", *rows),))
    ticks = iter(range(10_000))
    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    store = Store(tmp_path / "data")
    collect(llm, store, options, lambda done, total: None, deadline=5)
    assert 0 < len(store.samples) <= 6
    assert not llm.engine.core.has_unfinished()
    collect(llm, store, options, lambda done, total: None)
    assert len(store.samples) > 50


def test_of_a_large_file_some_rows_are_drawn(llm: LLM, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", *({"prompt": f"{number} + 3 ="} for number in range(50)))

    def drawn(seed: int) -> list[str]:
        return [prompt.text for prompt in read_prompts([file], llm.tokenizer, {}, 100, seed, 10)]

    assert len(set(drawn(0))) == 10
    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0)) | set(drawn(1)) | set(drawn(2))) > 15
    with file.open("a", encoding="utf-8") as rows:
        rows.write("[1]\n")
    with pytest.raises(TrainingError, match="line 51: this is list"):
        drawn(0)


def test_nobody_else_reads_what_people_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path / "out" / "data")
    store.add(Sample((1, 2), (3, 4, 5)))
    store.hold_out([(1,)])
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in store.folder.iterdir()} == {
        "samples.jsonl": 0o600,
        "held_out.jsonl": 0o600,
    }


def record(folder: Path, target: Path, *rows: Row) -> None:
    writer = TrafficWriter(folder, target, 1.0, 10**6, lambda *_: None, print)
    for row in rows:
        writer._write(row)
    writer.close()


def test_recorded_answers_of_this_target_are_taken_as_they_are(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = tmp_path / "traffic", llm.target_dir
    prompts = [llm.tokenizer.encode(question) for question in QUESTIONS]
    recorded = [Row(prompt, [50 + index] * (2 + 3 * index), 0.7) for index, prompt in enumerate(prompts)]
    record(folder, target, *recorded, recorded[0], Row([9] * 80, [5] * 5, 0.0))
    asked: list[Any] = []
    monkeypatch.setattr(llm, "generate", lambda prompts, *_, **__: asked.extend(prompts))
    store, options = Store(tmp_path / "data"), DataOptions(10_000, max_answer=9, max_prompt=60, traffic=folder)
    collect(llm, store, options, lambda done, total: None)
    assert asked == []
    assert len(store.held_out) == 4
    collect(llm, store, options, lambda done, total: None)  # and goes on from what is there
    (sample,) = store.samples
    assert list(sample.answer) == recorded[prompts.index(list(sample.prompt))].answer[:9]
    assert {sample.prompt, *store.held_out} == {tuple(prompt) for prompt in prompts}


def test_prompts_that_another_target_answered_are_answered_anew(llm: LLM, tmp_path: Path) -> None:
    folder, other = tmp_path / "traffic", tmp_path / "other"
    shutil.copytree(llm.target_dir, other)
    with (other / "model.safetensors").open("r+b") as weights:
        weights.seek(-9, os.SEEK_END)
        weights.write(b"\1" * 9)
    questions = [f"Count from {first} to {first + 5}." for first in range(2, 8)]
    record(folder, other, *(Row(llm.tokenizer.encode(question), [7] * 9, 0.0) for question in questions))
    store = Store(tmp_path / "data")
    collect(llm, store, DataOptions(10_000, max_answer=12, traffic=folder), lambda done, total: None)
    for sample in store.samples:
        expected = llm.generate([list(sample.prompt)], max_tokens=12, temperature=0)[0]
        assert list(sample.answer) == expected.token_ids
    assert len(store.samples) == 2


def test_traffic_that_is_of_no_use_is_a_sentence(llm: LLM, tmp_path: Path) -> None:
    options = DataOptions(10, max_prompt=3, traffic=tmp_path / "none")
    with pytest.raises(TrainingError, match=r"none is no folder; name the one of a server's setting record_traffic"):
        collect(llm, Store(tmp_path / "data"), options, lambda done, total: None)
    (tmp_path / "none").mkdir()
    record(tmp_path / "none", llm.target_dir, Row([5] * 9, [6] * 4, 0.0))
    with pytest.raises(TrainingError, match=r"none: all 1 prompts have more than 3 tokens; raise --max-prompt"):
        collect(llm, Store(tmp_path / "data"), options, lambda done, total: None)


@pytest.mark.parametrize(("prompt", "answer"), [([5, -1], [6]), ([5], [6, 1 << 40])])
def test_token_ids_that_the_target_has_not_are_a_sentence(
    llm: LLM, tmp_path: Path, prompt: list[int], answer: list[int]
) -> None:
    record(tmp_path / "traffic", llm.target_dir, Row(prompt, answer * 4, 0.0))
    store = Store(tmp_path / "data")
    with pytest.raises(TrainingError, match=r"traffic has a token id that the target has not \(allowed: 0 to \d+\)"):
        collect(llm, store, DataOptions(10, traffic=tmp_path / "traffic"), lambda done, total: None)


def test_a_line_that_a_killed_run_left_is_taken_away(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(Sample((1, 2), (3,)))
    file = tmp_path / "samples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"prompt":[1,2],"ans')
    assert Store(tmp_path).samples == [Sample((1, 2), (3,))]
    assert file.read_bytes() == whole
    file.write_bytes(whole + b'{"prompt":[1],"answer":["x"]}\n')
    with pytest.raises(TrainingError, match=r"samples.jsonl, line 2, is damaged"):
        Store(tmp_path)


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"samples.jsonl cannot be written: No space left on device; make room"):
        store.add(Sample((1,), (2,)))
    assert store.samples == []


def test_data_of_another_target_or_other_options_lies_elsewhere(tmp_path: Path, llm: LLM) -> None:
    target = llm.engine.pair.target.path
    first = DataOptions(10).fingerprint(target)
    assert DataOptions(99).fingerprint(target) == first
    assert DataOptions(10, temperature=0.5).fingerprint(target) != first
    assert DataOptions(10).fingerprint(target, {"dtype": "bfloat16"}) != first
    (tmp_path / "traffic").mkdir()
    recorded = DataOptions(10, traffic=tmp_path / "traffic").fingerprint(target)
    record(tmp_path / "traffic", target, Row([1], [2], 0.0))  # the server goes on writing
    assert DataOptions(10, traffic=tmp_path / "traffic").fingerprint(target) == recorded != first
    fine_tune = tmp_path / "fine-tune"
    shutil.copytree(target, fine_tune)
    assert DataOptions(10).fingerprint(fine_tune) == first  # a copy is the same one
    with (fine_tune / "model.safetensors").open("r+b") as weights:
        weights.seek(-9, os.SEEK_END)
        weights.write(b"\1" * 9)
    assert DataOptions(10).fingerprint(fine_tune) != first
    assert DataOptions(10, template_options={"enable_thinking": False}).fingerprint(target) != first
    other = llm.engine.pair.draft_model or target.parent / "draft"
    assert DataOptions(10).fingerprint(Path(str(other))) != first
