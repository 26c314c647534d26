"""Counts the files, functions and classes of this project that one job enters: `python -m tools.walk [JOB ...]`.

A job runs for real, in this process, on the embedded demo pair. `sys.setprofile` gives functions and files. Classes are
those that are called to make an instance. (Each module is rewritten as it is imported to see these calls: a profiler
does not see how a `msgspec.Struct` is made.) Generated code, comprehensions and lambdas do not count as functions. Each
count is given twice: without the mathematics (models, attention, kernels), and of everything. `--list` prints what was
entered, `--markdown` a table.

Jobs: `arrival` (a prompt's text to its first token), `decode` (one step of a request that drafts), `allocation` (the
plan of the step that admits a prompt whose beginning is cached) and `prefix-hit` (such a request to its first token).
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = tuple(str(ROOT / name) + "/" for name in ("dflash_backend", "kernels", "client", "frontend"))
MATHEMATICS = ("dflash_backend/models/", "dflash_backend/attention/", "kernels/")
PROMPT = "Write a function that adds 3. Then write one that subtracts 4, and one that multiplies by 5."
DECODE_STEP = 4  # of the steps after the prompt: the first ones learn


@dataclass
class Walk:
    """What a job entered: `(file, function)` pairs, and the names of classes that it made instances of."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)

    @property
    def files(self) -> set[str]:
        """Files of the functions."""
        return {file for file, _ in self.functions}

    def without_mathematics(self) -> Walk:
        """The same without models, attention and kernels."""
        functions = {each for each in self.functions if not each[0].startswith(MATHEMATICS)}
        return Walk(functions, {name for name in self.classes if not name.replace(".", "/").startswith(MATHEMATICS)})

    def counts(self) -> tuple[int, int, int]:
        """Files, functions and classes."""
        return len(self.files), len(self.functions), len(self.classes)


_current: Walk | None = None


def seen(called: Any) -> Any:
    """Note `called` if it is a class of the project: put around the function of each call."""
    if _current is not None and isinstance(called, type) and called.__module__.startswith("dflash"):
        _current.classes.add(f"{called.__module__}.{called.__qualname__}")
    return called


class _Calls(ast.NodeTransformer):
    """Puts `seen` around what each call calls."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id == "super"):
            node.func = ast.copy_location(ast.Call(ast.Name("__seen__", ast.Load()), [node.func], []), node.func)
        return node


class _Loader(SourceFileLoader):
    """Compiles the project's modules with `seen` in their calls."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(ast.fix_missing_locations(_Calls().visit(tree)), path, "exec", dont_inherit=True)


def watch_imports() -> None:
    """From now on the project's own modules are imported through `_Loader`. Kernels keep their source: Triton reads
    it."""
    import builtins
    from importlib.machinery import PathFinder

    builtins.__seen__ = seen  # type: ignore[attr-defined]

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if not name.startswith("dflash") or name.startswith("dflash_kernels"):
                return None
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
            if spec is not None and type(spec.loader) is SourceFileLoader:
                spec.loader = _Loader(spec.loader.name, spec.loader.path)
            return spec

    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")] or [PathFinder]
    sys.meta_path.insert(0, Finder)


@contextmanager
def walking() -> Iterator[Walk]:
    """Note what this thread enters within the block."""
    global _current
    walk = Walk()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(PRODUCT):
            walk.functions.add((code.co_filename[len(str(ROOT)) + 1 :], code.co_qualname))

    _current = walk
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        _current = None


class Bench:
    """The demo pair in this process, without speculation that follows the load: each step drafts."""

    def __init__(self) -> None:
        from dflash_backend import LLM

        self.llm = LLM(adaptive_speculation=False, max_model_len=1024, max_num_seqs=4, kv_cache_gb=0.1)
        self.core: Any = self.llm.engine.core
        self.llm.generate("Hello.", max_tokens=4, temperature=0)

    def until_token(self, prompt: str) -> None:
        """Run a request to its first token; it ends after that."""
        self.llm.generate(prompt, max_tokens=1, temperature=0)

    def arrival(self) -> Walk:
        """A prompt's text to its first token."""
        with walking() as walk:
            self.until_token(PROMPT)
        return walk

    def decode(self) -> Walk:
        """One step of a request that drafts."""
        return self._nth_step(lambda number: number == DECODE_STEP)

    def _nth_step(self, wanted: Callable[[int], bool]) -> Walk:
        step, walks, number = self.core.step, [], 0

        def watched() -> Any:
            nonlocal number
            number += 1
            if not wanted(number):
                return step()
            with walking() as walk:
                outputs = step()
            walks.append(walk)
            return outputs

        self.core.step = watched
        try:
            self.llm.generate(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
        finally:
            del self.core.step
        return walks[0]

    def allocation(self) -> Walk:
        """The plan of the step that admits a prompt whose beginning is cached."""
        prompt = "The first lines of this prompt are cached. " * 20
        self.until_token(prompt)
        scheduler, walks = self.core.scheduler, []
        plan = scheduler.plan

        def watched(*args: Any, **kwargs: Any) -> Any:
            with walking() as walk:
                result = plan(*args, **kwargs)
            walks.append(walk)
            return result

        scheduler.plan = watched
        try:
            self.until_token(prompt + "And this is new.")
        finally:
            del scheduler.plan
        return walks[0]

    def prefix_hit(self) -> Walk:
        """A request whose beginning is cached, from the engine's queue to its first token."""
        prompt = "Another prompt whose first lines are cached. " * 20
        self.until_token(prompt)
        with walking() as walk:
            self.until_token(prompt + "And this is new.")
        return walk


JOBS = ("arrival", "decode", "allocation", "prefix-hit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.walk", description=__doc__.partition("\n\n")[0])
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], help="which jobs to run; all by default")
    parser.add_argument("--list", action="store_true", help="print the functions and classes of each job")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    watch_imports()
    bench = Bench()
    if options.markdown:
        print("| job | files | functions | classes |\n| --- | ---: | ---: | ---: |")
    for job in options.jobs or JOBS:
        walk: Walk = getattr(bench, job.replace("-", "_"))()
        files, functions, classes = zip(walk.without_mathematics().counts(), walk.counts(), strict=True)
        if options.markdown:
            print(f"| {job} | " + " | ".join(f"{few} of {every}" for few, every in (files, functions, classes)) + " |")
        else:
            print(f"{job}: {files[0]} files, {functions[0]} functions, {classes[0]} classes, ", end="")
            print(f"with the mathematics {files[1]}, {functions[1]} and {classes[1]}")
        if options.list:
            print(*sorted(f"  {file}: {name}" for file, name in walk.functions), sep="\n")
            print(*sorted(f"  class {name}" for name in walk.classes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
