"""Compiles the kernels of every call for one target, in a process of its own, launching nothing.

Triton asks its active driver which device it compiles for. This one answers with a target and says
that tensors live on the CPU, so that calls of the public ops on CPU tensors build exactly the
specialisations that users hit. Kernels cache per device, not per target: one process per target.

One target compiles all of them, the others what `covering` chooses: options that meet in one kernel
are the front end's business, which is the same for all; registers, spills and access widths are
each target's own, and follow from dtypes, tiles and from how many options are on. A quick run takes
what `extremes` chooses, on every target.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.ops import Compiled, Expect
from tests.aot import versions
from tests.aot.bounds import BY_INSTRUCTIONS, MOST_PER_BYTE, MOST_SCALAR_SPILLS, NEEDS
from tests.aot.cubin import disassemble, usage_of
from tests.aot.isa import (
    Loop,
    basename,
    parse_amdgcn_usage,
    parse_assembly,
    parse_loops,
    parse_ttgir,
)
from tests.aot.judge import judge

KERNEL_NAMES = "_*_kernel"
ABSENT = "constexpr None"  # an optional argument that is left out
Arguments = Mapping[str, str]  # what a specialisation knows of each argument
# Which of a kernel's specialisations stand for all of them.
Choice = Callable[[Mapping[str, Arguments]], set[str]]


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, as ``triton.backends.compiler.GPUTarget`` wants it."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_per_block: int  # bytes that a block may take
    shared_per_processor: int
    reserved_per_block: int  # bytes of shared memory that each block costs besides its own
    # Instructions per thread and byte beyond which a loop cannot keep up with the memory: those
    # that all processors issue in a second, over the bytes that the memory moves in practice.
    issue_limit: float
    full: bool = False  # compile every specialisation
    in_flight_share: float = 1.0  # of what `bounds.NEEDS` wants in flight


KIB = 1024
TARGETS = {
    t.name: t
    for t in (
        # The quickest to compile for. A100: 108 · 4 · 32 · 1.41 GHz, 1.8 TB/s.
        Target("sm_80", "cuda", 80, 32, 163 * KIB, 164 * KIB, KIB, 10.8, full=True),
        # H200: 132 · 4 · 32 · 1.76 GHz, 4.3 TB/s; an H100, at 3.0 TB/s, can do with 9.9.
        Target("sm_90", "cuda", 90, 32, 227 * KIB, 228 * KIB, KIB, 6.9),
        # B200: 148 · 4 · 32 · 1.85 GHz, 7.2 TB/s.
        Target("sm_100", "cuda", 100, 32, 227 * KIB, 228 * KIB, KIB, 4.9),
        # MI300X: 304 · 4 · 16 · 2.1 GHz, 4.6 TB/s: of an H100's, two thirds for each processor.
        Target("gfx942", "hip", "gfx942", 64, 64 * KIB, 64 * KIB, 0, 8.9, in_flight_share=2 / 3),
    )
}


@dataclass(frozen=True)
class Row:
    """One specialisation of one kernel on one target."""

    target: str
    kernel: str
    op: str
    cases: tuple[str, ...]
    constants: dict[str, Any]
    warps: int
    registers: int
    shared: int
    spills: int
    loads: str
    stores: str
    scalar_spills: int = 0
    resident: int = 0  # blocks that a multiprocessor holds
    per_byte: str = (
        "-"  # instructions per thread and byte of main loops, least/most; ! where too many
    )
    in_flight: int = 0  # bytes that a multiprocessor's blocks ask for before they use one
    faults: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    let_pass: str = ""  # what was not demanded, and why


@dataclass(frozen=True)
class CaseError:
    """A call that raised."""

    case: str
    message: str
    trace: str


@dataclass
class Report:
    """Everything that one target's process found."""

    target: str
    rows: list[Row] = field(default_factory=list)
    errors: list[CaseError] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    triton: str = ""  # the version that compiled

    @property
    def passed(self) -> bool:
        clean = not any(row.faults for row in self.rows)
        return clean and bool(self.rows) and not self.errors and not self.missing

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        # JSON knows lists only.
        rows: list[dict[str, Any]] = [
            {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
            for row in data["rows"]
        ]
        return cls(
            target=data["target"],
            rows=[Row(**row) for row in rows],
            errors=[CaseError(**error) for error in data["errors"]],
            missing=data["missing"],
            seconds=data["seconds"],
            triton=data["triton"],
        )


@dataclass
class Specialisation:
    """A kernel compiled, and the calls that asked for it."""

    function: Any  # triton.runtime.jit.JITFunction
    op: str
    kernel: Any  # triton.compiler.CompiledKernel
    expect: Expect
    cases: list[str]


class CompileOnlyDriver:
    """Stands in for a GPU's driver as far as compilation asks."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


@contextmanager
def no_products() -> Iterator[None]:
    """Context in which products of matrices leave their results as memory is: a call's contents do
    not matter, and products would take longer than all else."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class NoProducts(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs, packet = kwargs or {}, function.overloadpacket
            if packet in (aten.mm, aten.addmm, aten.addmm_) and "out" in kwargs:
                return kwargs["out"]
            if packet is aten.addmm_:
                return args[0]
            if function is aten.mm.default:
                return args[0].new_empty(args[0].shape[0], args[1].shape[1])
            return function(*args, **kwargs)

    with NoProducts():
        yield


class Recorder:
    """Turns every launch of a Triton kernel into its compilation, and keeps the result."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.compiled: dict[str, Specialisation] = {}
        self._op = self._name = ""
        self._call: Compiled | None = None
        self._launches = 0

    def choose(self, calls: Sequence[tuple[str, Compiled]], standing_for: Choice) -> None:
        """Compile from now on only what stands for the specialisations of these calls."""
        from triton import knobs

        found: dict[Any, dict[str, Arguments]] = defaultdict(dict)

        def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            found[fn.jit_function][key] = _arguments(compile)
            return True  # do not compile

        knobs.runtime.jit_cache_hook = note
        for _, call in calls:
            with suppress(Exception), no_products():  # it will be raised again, and reported
                call.call()
        chosen = {function: standing_for(each) for function, each in found.items()}
        knobs.runtime.jit_cache_hook = lambda *, key, fn, **_: key not in chosen[fn.jit_function]

    def install(self) -> None:
        """Replace the driver and the launch, for the rest of the process."""
        from triton.runtime import driver
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        driver.set_active(CompileOnlyDriver(self.target))
        compile_or_launch = JITFunction.run

        def compile_only(
            function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any
        ) -> Any:
            kernel = compile_or_launch(function, *args, grid=grid, warmup=True, **kwargs)
            self._record(function, kernel)
            return kernel

        def compile_all(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            # There is nothing to time: every candidate must pass.
            kwargs.pop("warmup", None)
            return tuner.warmup(*args, **kwargs)[-1]

        JITFunction.run = compile_only
        Autotuner.run = compile_all

    def call(self, op: str, call: Compiled) -> None:
        """Make the call; one that compiles nothing has fallen back to something else."""
        self._op, self._name, self._call = op, f"{op}[{call.label}]", call
        self._launches = 0
        with no_products():
            call.call()
        if not self._launches:
            raise RuntimeError("the call launched no Triton kernel")

    def _record(self, function: Any, kernel: Any) -> None:
        self._launches += 1
        if kernel is None:  # not chosen
            return
        assert self._call is not None, "a kernel was launched outside of a call"
        name = function.fn.__name__
        expects = (e for pattern, e in self._call.kernels.items() if fnmatch(name, pattern))
        expect = next(expects, self._call.expect)
        seen = self.compiled.get(kernel.hash)
        if seen is None:
            found = Specialisation(function, self._op, kernel, expect, [self._name])
            self.compiled[kernel.hash] = found
            return
        seen.expect = seen.expect.stricter(expect)
        if self._name not in seen.cases:
            seen.cases.append(self._name)


def _arguments(compile: Mapping[str, Any]) -> Arguments:
    """Types, constants and alignments, as Triton's hook tells them; and the number of warps."""
    names = list(compile["signature"])
    found = {name: str(kind) for name, kind in compile["signature"].items()}
    for path, constant in compile["constants"].items():
        found[names[path[0]]] += f" {constant}"
    for path, alignment in compile["configs"][0].items():
        found[names[path[0]]] += f" {alignment or ''}".rstrip()
    return {**found, "num_warps": str(compile["num_warps"])}


def covering(specialisations: Mapping[str, Arguments]) -> set[str]:
    """Which of a kernel's specialisations stand for all of them on a target.

    The arguments that none of them leaves out (dtypes, alignments, tiles, formulas) are a shape:
    each shape is compiled with the most options that it comes with, and of each option every value
    at least once.
    """
    options = {k for each in specialisations.values() for k, v in each.items() if v == ABSENT}
    chosen: set[str] = set()
    seen: set[object] = set()
    fullest_first = sorted(
        specialisations.items(), key=lambda item: list(item[1].values()).count(ABSENT)
    )
    for key, arguments in fullest_first:
        values = {(k, v) for k, v in arguments.items() if k in options}
        new = {frozenset(arguments.items() - values), *values}
        if not new <= seen:
            chosen.add(key)
            seen |= new
    return chosen


def extremes(specialisations: Mapping[str, Arguments]) -> set[str]:
    """Of each dtype of a kernel's first tensor the specialisation with the most options, and of the
    kernel the one with the fewest, whose code may be another one."""
    left_out = {k: list(v.values()).count(ABSENT) for k, v in specialisations.items()}
    by_dtype: dict[str, list[str]] = {}
    for key, arguments in specialisations.items():
        by_dtype.setdefault(next(iter(arguments.values())).split()[0], []).append(key)
    chosen = {min(keys, key=left_out.__getitem__) for keys in by_dtype.values()}
    return chosen | {max(left_out, key=left_out.__getitem__)}


def kernel_name(function: Any) -> str:
    """The file and the kernel: ``logprob._token_logprobs_fwd_kernel``."""
    return f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}"


def machine_codes(compiled: Sequence[Specialisation], target: Target) -> list[str]:
    """Each kernel's instructions, as text."""
    if target.backend == "cuda":
        assert isinstance(target.arch, int)
        return disassemble([each.kernel.asm["cubin"] for each in compiled], target.arch)
    return [each.kernel.asm["amdgcn"] for each in compiled]


def analyse(compiled: Specialisation, target: Target, machine_code: str) -> Row:
    """Read registers, spills and access widths from what the compiler produced."""
    kernel = compiled.kernel
    if target.backend == "cuda":
        assembly, usage = kernel.asm["ptx"], usage_of(kernel.asm["cubin"])
    else:
        assembly = machine_code
        usage = parse_amdgcn_usage(assembly)
    warps = kernel.metadata.num_warps
    verdict = judge(
        parse_assembly(assembly, target.backend),
        parse_ttgir(kernel.asm["ttgir"]),
        threads=warps * target.warp_size,
        expect=compiled.expect,
        spans=_helper_spans(compiled.function),
    )
    too_many = usage.spills or usage.scalar_spills > MOST_SCALAR_SPILLS
    faults = [f"spills ({usage.spill_detail})"] if too_many else []
    name, shared = kernel_name(compiled.function), kernel.metadata.shared
    resident = blocks_per_processor(target, warps, usage.registers, shared)
    main = main_loops(parse_loops(machine_code, target.backend), name)
    per_byte = [loop.instructions_per_byte for loop in main]
    in_flight = resident * warps * target.warp_size * max((x.in_flight for x in main), default=0)
    return Row(
        target=target.name,
        kernel=name,
        op=compiled.op,
        cases=tuple(compiled.cases),
        constants=_constants(kernel),
        warps=warps,
        registers=usage.registers,
        shared=shared,
        spills=usage.spills,
        scalar_spills=usage.scalar_spills,
        loads=str(verdict.loads or "-"),
        stores=str(verdict.stores or "-"),
        resident=resident,
        per_byte=_shown(per_byte, target),
        in_flight=in_flight,
        faults=(
            *faults,
            *verdict.faults,
            *over_limits(target, name, shared, per_byte, in_flight, compiled.cases),
        ),
        lines=verdict.lines,
        let_pass=compiled.expect.why,
    )


def _shown(per_byte: Sequence[float], target: Target) -> str:
    """The least and the most, with a mark where instructions are what a loop waits for."""
    if not per_byte:
        return "-"
    both = dict.fromkeys(f"{x:.1f}" for x in (min(per_byte), max(per_byte)))
    return "/".join(both) + "!" * (max(per_byte) > target.issue_limit)


def main_loops(loops: Sequence[Loop], kernel: str = "") -> list[Loop]:
    """Those that move the most bytes per round: the others are a row's ends. Of some kernels, by
    their names in `bounds.py`, those of the most instructions."""

    def size(loop: Loop) -> int:
        return loop.instructions if kernel in BY_INSTRUCTIONS else loop.moved

    most = max(map(size, loops), default=0)
    return [loop for loop in loops if size(loop) == most]


def blocks_per_processor(target: Target, warps: int, registers: int, shared: int) -> int:
    """How many blocks a multiprocessor holds at a time, by threads, registers and shared memory."""
    if target.backend == "cuda":
        # A warp's registers are given out by 256, a multiprocessor has 65536 of them.
        by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
        by_threads = min(32, 2048 // (32 * warps))
    else:
        # Each of four units has 512 registers for every lane, given out by 8, and 8 wavefronts.
        by_registers = 4 * (512 // max(8, -(-registers // 8) * 8)) // warps
        by_threads = 32 // warps
    needed = shared + target.reserved_per_block
    by_shared = target.shared_per_processor // needed if needed else by_threads
    return min(by_registers, by_threads, by_shared)


def over_limits(
    target: Target,
    kernel: str,
    shared: int,
    per_byte: Sequence[float],
    in_flight: int,
    cases: Sequence[str] = (),
) -> list[str]:
    """What a kernel takes too much of, or holds too little of in flight."""
    faults = []
    if shared > target.shared_per_block:
        faults.append(
            f"{shared} bytes of shared memory, {target.name} has {target.shared_per_block}"
        )
    most = max(per_byte, default=0.0)
    bound = MOST_PER_BYTE.get(kernel)
    if bound and most > bound:
        faults.append(
            f"{most:.1f} instructions per byte in the main loop, above its bound, "
            f"{bound}: tests/aot/bounds.py"
        )
    for need in NEEDS:
        if need.kernel != kernel or not need.of(cases):
            continue
        if target.name in need.targets and most > target.issue_limit:
            faults.append(
                f"{most:.1f} instructions per byte in the main loop, and the memory, not they, is "
                f"to bind it ({target.issue_limit:g}): {need.roof}"
            )
        wanted = round(need.in_flight * target.in_flight_share)
        if in_flight < wanted:
            faults.append(
                f"{in_flight // KIB} KiB in flight per multiprocessor, at least "
                f"{wanted // KIB}: {need.roof}"
            )
    return faults


def _constants(kernel: Any) -> dict[str, Any]:
    names = kernel.src.fn.arg_names
    return {
        names[path[0] if isinstance(path, tuple) else path]: value
        for path, value in kernel.src.constants.items()
        if isinstance(value, (bool, int, float, str))
    }


def _helper_spans(function: Any) -> dict[str, tuple[str, range]]:
    """Where the functions that a kernel can call by name are written."""
    spans = {}
    for name, value in function.fn.__globals__.items():
        if isinstance(value, type(function)):
            code = value.fn.__code__
            # Lines as Triton sees them; the code object ends where the body's last statement does.
            last = max((line for *_, line in code.co_lines() if line), default=0)
            spans[name] = (basename(code.co_filename), range(code.co_firstlineno, last + 1))
    return spans


def defined_kernels(package: str) -> tuple[set[str], list[CaseError]]:
    """Every kernel that a package (or module) defines, and the modules that failed to import."""
    from triton.runtime.jit import JITFunction

    kernels, errors = set(), []
    root = importlib.import_module(package)
    names = [package]
    if hasattr(root, "__path__"):
        names += [m.name for m in pkgutil.walk_packages(root.__path__, f"{package}.")]
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            errors.append(_case_error(f"import {name}", error))
            continue
        for attribute, value in vars(module).items():
            while not isinstance(value, JITFunction) and hasattr(value, "fn"):
                value = value.fn  # autotuned and heuristic kernels wrap the function
            defined_here = isinstance(value, JITFunction) and value.fn.__module__ == name
            if defined_here and fnmatch(attribute, KERNEL_NAMES):
                kernels.add(kernel_name(value))
    return kernels, errors


def _case_error(case: str, error: Exception) -> CaseError:
    """In one line, the error that the others were raised from: the compiler wraps each level."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip(" ^")] or [""]
    trace = "".join(traceback.format_exception(error))
    return CaseError(case, f"{type(error).__name__}: {lines[-1].strip()}", trace)


def gate(
    target: Target,
    calls: Sequence[tuple[str, Compiled]],
    package: str | None,
    standing_for: Choice | None,
) -> Report:
    """Compile the calls, or what stands for them; with a package, also demand that each of its
    kernels was among them."""
    start = time.monotonic()
    report = Report(target.name, triton=versions.installed())
    recorder = Recorder(target)
    recorder.install()
    if standing_for is not None:
        recorder.choose(calls, standing_for)
    for op, call in calls:
        try:
            recorder.call(op, call)
        except Exception as error:  # whatever it raises, the other calls still get their turn
            report.errors.append(_case_error(f"{op}[{call.label}]", error))
    found = list(recorder.compiled.values())
    codes = machine_codes(found, target)
    report.rows = [analyse(x, target, code) for x, code in zip(found, codes, strict=True)]
    if package:
        kernels, import_errors = defined_kernels(package)
        report.errors += import_errors
        report.missing = sorted(kernels - {row.kernel for row in report.rows})
    report.seconds = time.monotonic() - start
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--calls", required=True, help="a module with PACKAGE and compiled()")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--full", action="store_true", help="compile every specialisation")
    parser.add_argument(
        "--quick", action="store_true", help="compile the fullest of each dtype, and the barest"
    )
    parser.add_argument("--out", type=Path, required=True, help="the report, as JSON")
    args = parser.parse_args(argv)

    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(args.calls)
    calls = list(module.compiled())
    if unknown := set(args.op) - {op for op, _ in calls}:
        known = ", ".join(sorted({op for op, _ in calls}))
        parser.error(f"no call of {', '.join(sorted(unknown))}: choose from {known}")
    calls = [(op, call) for op, call in calls if not args.op or op in args.op]
    # With some ops left out, some kernels are left out too.
    target = TARGETS[args.target]
    package = None if args.op else module.PACKAGE
    standing_for = extremes if args.quick else None if args.full or target.full else covering
    report = gate(target, calls, package, standing_for)
    args.out.write_text(json.dumps(asdict(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
