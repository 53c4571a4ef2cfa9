"""Sides of `test_cuts.py`: steps on what top-p leaves of the vocabulary, and texts of a form."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from benchmarks.sides.grpo import GRPOSide, UpdateSide
from benchmarks.sides.ppo import sampling
from benchmarks.sides.rollout import VLLM, Engine, RolloutSide, Workload
from benchmarks.timing import now

ANSWER_TOKENS = 60  # more than an answer has, of one byte each


class CutStepSide(GRPOSide):
    """fastrl's GRPO steps on responses drawn with top-p; ``support`` says what their log-probs are
    over."""

    def __init__(self, library: Any, shape: dict[str, Any], support: str) -> None:
        self.settings = {"policy_support": support}
        super().__init__(library, shape)

    def step(self) -> dict[str, Any]:
        """Statistics of a step, and the seconds of its rollout."""
        queries, device = self.queries(), next(self.model.parameters()).device
        started, length = now(device), self.shape["completion"]
        cut = sampling(length) | {"top_p": self.shape["top_p"]}
        responses = self.trainer.generate(
            queries, batch_size=len(queries), return_prompt=False, **cut
        )
        rollout = now(device) - started
        return {**self.learn(queries, responses), "rollout": rollout}

    def check(self) -> dict[str, Any]:
        """{"ratio": how far from 1 the ratio of the update to the rollout is at most, as nothing
        was learned in between}."""
        ratios = self.step()["ppo/policy/ratio"]
        return {"ratio": float(abs(ratios - 1).max())}

    def turn(self) -> dict[str, Any]:
        """{"seconds": of the rollout, and of the phases of an :class:`UpdateSide`}."""
        stats = self.step()
        phases = {phase: stats[timer] for phase, timer in UpdateSide.TIMERS.items()}
        return {"seconds": {"rollout": stats["rollout"], **phases}}


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class FormEngine(Engine):
    """fastrl's engine, texts of a form, and log-probs over what it allows."""

    note = "also log-probs over what is allowed, and the sets"

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.engine.tokenizer = self.tokenizer = _tokenizer(folder)
        self.drawing = self._of(shape["form"])

    @staticmethod
    def _of(form: dict[str, Any]) -> dict[str, Any]:
        """Only where a text is complete it may end."""
        given = {"json_schema": form, "whitespace": False}
        return {"response_format": given, "policy_support": "sampled", "eos_token_ids": None}

    def texts(self, work: Workload, form: dict[str, Any], most: int) -> list[str]:
        """Responses of another form, to their ends."""
        params = self.library.SamplingParams(max_new_tokens=most, seed=0, **self._of(form))
        made = self.engine.generate(work.prompts, params).sequences
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in made]

    def facts(self) -> dict[str, float]:
        names = {"made": "sets made [s a step]", "waited": "sets waited for [s a step]"}
        host = {names[x]: self.stats[f"perf/grammar_{x}_seconds"] for x in names}
        return super().facts() | host


class FormVLLM(VLLM):
    """vLLM, texts of a form, by llguidance too."""

    settings: ClassVar = {
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
    }

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, work: Workload) -> None:
        super().__init__(library, shape, folder, work)
        self.tokenizer, self.note = _tokenizer(folder), f"{self.note}; by llguidance"
        self.drawing = self._of(shape["form"])

    @staticmethod
    def _of(form: dict[str, Any]) -> dict[str, Any]:
        from vllm.sampling_params import StructuredOutputsParams

        return {"structured_outputs": StructuredOutputsParams(json=json.dumps(form))}

    def texts(self, work: Workload, form: dict[str, Any], most: int) -> list[str]:
        """Responses of another form, to their ends."""
        params = self.library.SamplingParams(max_tokens=most, seed=0, **self._of(form))
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in work.prompts]
        made = [out.outputs[0] for out in self.llm.generate(prompts, params, use_tqdm=False)]
        return [self.tokenizer.decode(x.token_ids, skip_special_tokens=True) for x in made]


class FormSide(RolloutSide):
    """A way to generate texts of a form, or any text, by name."""

    generators: ClassVar = {
        "engine": Engine,
        "engine, form": FormEngine,
        "vllm": VLLM,
        "vllm, form": FormVLLM,
    }

    def __init__(
        self, library: Any, shape: dict[str, Any], folder: str = "", generator: str = ""
    ) -> None:
        self.answer, self.most = shape["answer"], ANSWER_TOKENS
        super().__init__(library, shape, folder, generator)

    def check(self) -> dict[str, Any]:
        """A rollout that is not timed; where there is a form, texts of a shorter one, too."""
        made = {**self.generator(self.work)._asdict(), "note": self.generator.note}
        if isinstance(self.generator, FormEngine | FormVLLM):
            made["texts"] = self.generator.texts(self.short, self.answer, self.most)
        return made
