"""Sides of `test_rollout.py`: ways to generate, each on a model that lies in a folder."""

from __future__ import annotations

import importlib.util
import math
import time
import types
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.memory import peak_of_process
from benchmarks.models import PAD
from benchmarks.timing import Seconds, now

PAGE = 256  # tokens, transformers' default
SHARE = 0.25  # of a GPU's memory that vLLM may reserve: other sides live there too
PATIENCE = 60  # seconds without an answer of continuous batching


class Workload(NamedTuple):
    """Prompts, on the host, and how many tokens are wanted after each: of each sample, and those of
    a group are one after the other."""

    prompts: list[Tensor]
    limits: list[int]
    group: int = 1

    def part(self, first: int, count: int) -> Workload:
        """Some of the samples."""
        return Workload(*(x[first : first + count] for x in self[:2]))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, its prompt's too."""
        return max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))


class Generated(NamedTuple):
    """Tokens without the prompts; their log-probs at temperature 1 where a side returns them."""

    sequences: list[list[int]]
    logprobs: list[list[float]] | None = None


def workload(shape: dict[str, Any]) -> Workload:
    """A job's prompts and lengths: the same every time."""
    rng = np.random.RandomState(0)
    low, high = shape["prompt"]
    prompts = [
        torch.from_numpy(rng.randint(0, shape["vocabulary"], rng.randint(low, high + 1)))
        for _ in range(shape["prompts"])
    ]
    lengths = rng.lognormal(math.log(shape["median"]), shape["sigma"], shape["prompts"])
    limits = np.clip(np.rint(lengths), 1, shape["most"]).astype(int).tolist()
    group = shape["group"]
    return Workload(*([x for x in of for _ in range(group)] for of in (prompts, limits)), group)


def short_work(vocabulary: int) -> Workload:
    """A few short prompts, of ragged length."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=drawn) for length in (1, 5, 3)]
    return Workload(prompts, [8] * len(prompts))


class RolloutSide:
    """A way to generate, by name, on the model in a folder."""

    generators: ClassVar[dict[str, type[Generator]]]

    def __init__(
        self, library: Any, shape: dict[str, Any], folder: str = "", generator: str = ""
    ) -> None:
        self.work = workload(shape)
        self.short = short_work(shape["vocabulary"])
        began = time.perf_counter()
        self.generator = self.generators[generator](library, shape, folder, self.work)
        self.built = time.perf_counter() - began

    def greedy(self) -> dict[str, Any]:
        """{"sequences": the most likely tokens after a few short prompts}."""
        return {"sequences": self.generator(self.short, greedy=True).sequences}

    def check(self) -> dict[str, Any]:
        """A rollout that is not timed, and what distinguishes this side."""
        return {**self.generator(self.work)._asdict(), "note": self.generator.note}

    def turn(self) -> dict[str, Any]:
        """{"seconds": of a rollout, and of its phases where they are known}."""
        device = self.generator.device
        began = now(device)
        self.generator(self.work)
        seconds = {"rollout": now(device) - began} | self.generator.seconds()
        return {"seconds": seconds, "peak": peak_of_process(device)}

    def facts(self) -> dict[str, float]:
        """Of the last rollout, and the seconds in which weights were loaded and the way to
        generate was set up, once its library was imported."""
        return {"loading and set-up [s]": self.built, **self.generator.facts()}


class Generator:
    """Base of the ways to generate.

    Args:
        library: the module that has it.
        shape: of the job.
        folder: of the model.
        work: the rollout that will be measured.
    """

    note = ""

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        self.slots = shape["slots"]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def __call__(self, work: Workload, greedy: bool = False) -> Generated:
        raise NotImplementedError

    def seconds(self) -> Seconds:
        """Of the phases of the last rollout."""
        return {}

    def facts(self) -> dict[str, float]:
        """What is known of the last rollout."""
        return {}

    def model(self, folder: str) -> Any:
        """The model in the dtype that it was saved in."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(self.device)


class Engine(Generator):
    """fastrl's engine."""

    note = "also log-probs and entropies"
    graphs = True
    drawing: ClassVar[dict[str, Any]] = {}  # further sampling parameters

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.library = library
        no_end = types.SimpleNamespace(eos_token_id=None)
        self.engine = library.RolloutEngine(
            self.model(folder), no_end, max_slots=self.slots, cuda_graphs=self.graphs
        )
        self.stats: dict[str, float] = {}

    def __call__(self, work: Workload, greedy: bool = False) -> Generated:
        params = self.library.SamplingParams(
            **{"eos_token_ids": ()} | self.drawing,
            n=work.group,
            max_new_tokens=work.limits[:: work.group],
            temperature=0.0 if greedy else 1.0,
            seed=0,
        )
        output = self.engine.generate(work.prompts[:: work.group], params)
        self.stats = output.stats
        return Generated(*([x.tolist() for x in y] for y in (output.sequences, output.logprobs_t1)))

    def seconds(self) -> Seconds:
        decode, steps = self.stats["time/rollout/decode"], self.stats["perf/decode_steps"]
        found = {"prefill": self.stats["time/rollout/prefill"], "decode": decode}
        return found | {"decode step": decode / max(steps, 1)}

    def facts(self) -> dict[str, float]:
        prefix = "perf/graph_"
        graphs = {k.removeprefix(prefix): v for k, v in self.stats.items() if k.startswith(prefix)}
        return {
            "decode steps": self.stats["perf/decode_steps"],
            "slots used": self.stats["perf/slot_utilisation"],
            **{f"graph {name}": value for name, value in graphs.items()},
        }


class EngineWithoutGraphs(Engine):
    """fastrl's engine, each decode step launched kernel by kernel."""

    graphs = False


class Transformers(Generator):
    """`model.generate`, as many prompts at a time as there are slots."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.note = (
            f"batches of {self.slots}, left-padded, each run to its longest limit; no log-probs, "
            "which take another forward"
        )
        self.loaded = self.model(folder)

    def __call__(self, work: Workload, greedy: bool = False) -> Generated:
        made = in_batches(self.loaded, self.slots, work, sampling(greedy) | self.options)
        return Generated([row.tolist() for row in made])


class Compiled(Transformers):
    """The same with a static cache, for which `generate` compiles the model."""

    options = {"cache_implementation": "static"}  # noqa: RUF012

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.note = "static cache and torch.compile; batches as above"
        # The largest batch first: its cache's length is kept, and a longer one would compile anew.
        parts = [work.part(i, self.slots) for i in range(0, len(work.limits), self.slots)]
        largest = max(parts, key=lambda part: max(map(len, part.prompts)) + max(part.limits))
        self(largest)


class Continuous(Generator):
    """transformers' continuous batching, by one manager."""

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.loaded, self.work = self.model(folder), work
        self.manager = self.managed(work, greedy=False)
        attention = self.loaded.config._attn_implementation
        self.note = f"{self.slots} requests at a time, {attention}; also log-probs"

    def managed(self, work: Workload, greedy: bool) -> Any:
        """A manager that has started, with room for the work."""
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        generation = GenerationConfig(
            **sampling(greedy), eos_token_id=-1, pad_token_id=PAD, max_new_tokens=max(work.limits)
        )
        config = ContinuousBatchingConfig(
            **self._of_version(ContinuousBatchingConfig),
            num_blocks=(self.slots + 1) * (-(-work.longest // PAGE) + 1),
            max_batch_tokens=min(8192, max(256, self.slots * max(map(len, work.prompts)))),
            max_requests_per_batch=self.slots,
            allow_block_sharing=False,  # or only the first round would run the prompts
            return_logprobs=True,
        )
        manager = self.loaded.init_continuous_batching(generation, config)
        manager.warmup()
        manager.start()
        return manager

    @staticmethod
    def _of_version(config: Any) -> dict[str, Any]:
        """Settings that have another name up to transformers 5.17, or are not there."""
        fields = config.__dataclass_fields__
        flash = importlib.util.find_spec("flash_attn") is not None
        switch = {"auto_switch_to_flash": flash} if "auto_switch_to_flash" in fields else {}
        return {"page_size" if "page_size" in fields else "block_size": PAGE, **switch}

    def __call__(self, work: Workload, greedy: bool = False) -> Generated:
        if not greedy:
            return answers(self.manager, work)
        manager = self.managed(work, greedy=True)
        try:
            return answers(manager, work)
        finally:
            manager.stop(timeout=10, hard_stop=True)


def answers(manager: Any, work: Workload) -> Generated:
    """What a manager generates for the work, in its order.

    Raises:
        RuntimeError: it fails, or its thread stalls, as it now and then does.
    """
    asked = [
        manager.add_request(prompt.tolist(), max_new_tokens=n)
        for prompt, n in zip(work.prompts, work.limits, strict=True)
    ]
    done: dict[str, Any] = {}
    heard = time.monotonic()
    while len(done) < len(asked):
        answer = manager.get_result(timeout=1)
        if answer is None:
            if not manager.is_running():
                raise RuntimeError("its generation thread has ended")
            if time.monotonic() - heard > PATIENCE:
                raise RuntimeError(f"no sample was finished within {PATIENCE} s")
            continue
        heard = time.monotonic()
        if answer.error is not None:
            raise RuntimeError(answer.error)
        if answer.is_finished():
            done[answer.request_id] = answer
    made = [done[name] for name in asked]
    return Generated([x.generated_tokens for x in made], [x.logprobs for x in made])


class VLLM(Generator):
    """vLLM in this very process, prefixes not kept: every round runs its prompts."""

    drawing: ClassVar[dict[str, Any]] = {}  # further sampling parameters
    settings: ClassVar[dict[str, Any]] = {"skip_tokenizer_init": True}

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.library = library
        room = {"gpu_memory_utilization": SHARE} if self.device.type == "cuda" else {}
        self.llm = library.LLM(
            folder,
            dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[shape["dtype"]],
            max_model_len=min(shape["context"], max(256, -(-work.longest // 64) * 64)),
            max_num_seqs=self.slots,
            enable_prefix_caching=False,
            seed=0,
            **self.settings,
            **room,
        )
        cache = self.llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes
        reserved = f"; {cache / 2**30:g} GiB are reserved for keys and values" if cache else ""
        self.note = f"also log-probs; prefix caching off, in one process{reserved}"

    def __call__(self, work: Workload, greedy: bool = False) -> Generated:
        params = [
            self.library.SamplingParams(
                temperature=0.0 if greedy else 1.0,
                max_tokens=n,
                min_tokens=n,
                ignore_eos=True,
                logprobs=0,  # of the drawn token alone
                detokenize=False,
                **self.drawing,
            )
            for n in work.limits
        ]
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in work.prompts]
        made = [out.outputs[0] for out in self.llm.generate(prompts, params, use_tqdm=False)]
        return Generated(
            [list(one.token_ids) for one in made],
            [
                [of[token].logprob for token, of in zip(one.token_ids, one.logprobs, strict=True)]
                for one in made
            ],
        )


RolloutSide.generators = {
    "engine": Engine,
    "engine without graphs": EngineWithoutGraphs,
    "generate": Transformers,
    "generate, compiled": Compiled,
    "continuous batching": Continuous,
    "vllm": VLLM,
}


def sampling(greedy: bool) -> dict[str, Any]:
    """Of `generate`: from the whole softmax, or its most likely token."""
    if greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def in_batches(model: Any, slots: int, work: Workload, options: dict[str, Any]) -> list[Tensor]:
    """What `model.generate` makes of the work, `slots` left-padded prompts at a time."""
    sequences = []
    for first in range(0, len(work.prompts), slots):
        prompts, limits, _ = work.part(first, slots)
        width = max(map(len, prompts))
        tokens = torch.full((len(prompts), width), PAD)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        made = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(limits),
            pad_token_id=PAD,
            **options,
        ).cpu()
        sequences += [row[width : width + n] for row, n in zip(made, limits, strict=True)]
    return sequences
