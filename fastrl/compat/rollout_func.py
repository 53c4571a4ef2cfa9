"""fastrl's rollout engine as the ``rollout_func`` of TRL's own GRPOTrainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accelerate.utils import DistributedType

from fastrl.collect.respond import samples_per_prompt
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.models.sharding import is_spread, whole_weights
from fastrl.rollout import RolloutEngine, SamplingParams, sampling_params
from fastrl.rollout.self_check import UnsupportedModel
from fastrl.run.processes import Processes, processes_of
from fastrl.run.random_state import seed_at

# The attributes of a trainer that are read, by their names in TRL 1.16.
_READ = (
    *("accelerator", "args", "model", "model_wrapped", "state", "processing_class"),
    *("generation_kwargs", "temperature", "num_generations", "num_generations_eval"),
    *("chat_template_kwargs", "tools", "environment_factories"),
)
_KEPT = "TRLRollouts"  # the key of the KV cache's size in trainer_state.json
_INSTEAD = "or leave rollout_func out, so that TRL generates"


class TRLRollouts:
    """Responses for TRL's own GRPOTrainer by fastrl's rollout engine, from the weights that TRL
    trains: ``trl.GRPOTrainer(..., rollout_func=fastrl.TRLRollouts())``.

    Prompts, settings of sampling and tokens that end a response are the trainer's, and log-probs
    are log softmax(logits / T) of the tokens at its temperature T. The responses to a prompt share
    its prefill. Draws depend on the trainer's seed, its optimizer step and the sample: a resumed
    run draws what it would have drawn.

    Args:
        slots: responses that are generated at a time, at most.
        kv_cache_gib: memory of keys and values; fewer slots where they do not fit. None: no limit.
        sleep: free the engine's memory before each update: less memory, slower.

    Raises:
        ValueError: a number that is not positive.
    """

    def __init__(self, slots: int = 64, kv_cache_gib: float | None = None, sleep: bool = False):
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        if kv_cache_gib is not None and not kv_cache_gib > 0:
            raise ValueError(f"kv_cache_gib must be positive, got {kv_cache_gib}")
        self.slots, self.kv_cache_gib, self.sleep = slots, kv_cache_gib, sleep
        self._trainer: Any = None
        self._processes: Processes | None = None
        self._engine: RolloutEngine | None = None
        self._room: dict[str, int] | None = None  # the KV cache's size, as in the trainer's state
        self._calls: Counter[tuple[str, int]] = Counter()  # of the latest optimizer step alone

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Returns a response to each prompt, as TRL 1.16 calls its ``rollout_func``.

        Args:
            prompts: texts or chats of this process, each as often as it has responses.
            trainer: TRL's GRPOTrainer.

        Returns:
            "prompt_ids", "completion_ids" (with the token that ends each) and "logprobs", each with
            a list per response; "logprobs" is None where decoding is greedy and T is not 1.

        Raises:
            TypeError: another kind of trainer.
            ValueError: another trainer than before; something that the engine does not do: vLLM,
                tools, environments, images, arguments of ``generate`` or models that it does not
                know; weights that FSDP1 or ZeRO-3 spreads; a temperature in ``generation_kwargs``
                that is not the trainer's; in several processes, ``evaluate()`` before ``train()``.
            PeerFailed: another process raised an exception; the message names process and error.
        """
        _check_kind(trainer)
        if self._processes is None:
            self._processes = processes_of(trainer.accelerator)
        with whole_weights(trainer.model_wrapped), self._processes.shared_work():
            return self._respond(prompts, trainer)

    def _respond(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        _check_settings(trainer)
        if self._trainer not in (None, trainer):
            raise ValueError(
                "these TRLRollouts generate for another trainer: make TRLRollouts() for each"
            )
        model = trainer.accelerator.unwrap_model(trainer.model)
        _check_wrapped(trainer, model)
        group = trainer.num_generations if model.training else trainer.num_generations_eval
        params = _params(trainer, model)
        templates = [trainer.chat_template_kwargs] * len(prompts)
        ids = ids_of_prompts(prompts, trainer.processing_class, templates)
        size = samples_per_prompt(ids, group)
        # A prompt's number keys its draws: no two processes have a number in common.
        processes, index = trainer.accelerator.num_processes, trainer.accelerator.process_index
        numbers = [index + processes * i for i in range(len(ids) // size)]
        moment = ("train" if model.training else "eval", trainer.state.global_step)
        self._calls = Counter({moment: self._calls[moment] + 1})
        seed = seed_at(trainer.args.seed, *moment, self._calls[moment])
        engine = self._engine or self._begin(trainer, model)
        self._adopt(trainer.state, engine)
        output = engine.generate(ids[::size], replace(params, n=size, seed=seed), numbers)
        if self.sleep:
            engine.sleep()
        self._keep(trainer.state, engine)
        logprobs = output.logprobs_at(trainer.temperature)
        return {
            "prompt_ids": [x.tolist() for x in ids],
            "completion_ids": [x.tolist() for x in output.sequences],
            "logprobs": None if logprobs is None else [x.tolist() for x in logprobs],
        }

    def _begin(self, trainer: Any, model: Any) -> RolloutEngine:
        gib = self.kv_cache_gib
        try:
            engine = RolloutEngine(
                model,
                trainer.processing_class,
                self.slots,
                kv_cache_bytes=None if gib is None else int(gib * 2**30),
                autocast=trainer.accelerator.autocast,
            )
        except UnsupportedModel as unsupported:
            raise ValueError(
                f"TRLRollouts cannot generate with {type(model).__name__}, because "
                f"{unsupported.cause}: train another model, {_INSTEAD}"
            ) from unsupported
        self._trainer, self._engine = trainer, engine
        return engine

    # The KV cache's size decides the last bits of later log-probs, so that checkpoints must keep
    # it: of what TRL saves, only its state's dict for callbacks has a place for it.

    def _adopt(self, state: Any, engine: RolloutEngine) -> None:
        kept = state.stateful_callbacks.get(_KEPT)
        if kept is not None and kept["attributes"] != self._room:
            engine.reserve(**kept["attributes"])

    def _keep(self, state: Any, engine: RolloutEngine) -> None:
        self._room = engine.room()._asdict()
        state.stateful_callbacks[_KEPT] = {"args": {}, "attributes": dict(self._room)}


def _check_kind(trainer: Any) -> None:
    if type(trainer).__module__.split(".")[0] == "fastrl":
        raise TypeError(
            f"{type(trainer).__module__}.{type(trainer).__name__} has the rollout engine already: "
            "leave rollout_func out"
        )
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.split(".")[0] == "trl"]
    missing = [name for name in _READ if not hasattr(trainer, name)]
    # With vLLM, TRL makes no generation_kwargs; _check_settings refuses use_vllm by name.
    if getattr(trainer, "use_vllm", False):
        missing = [name for name in missing if name != "generation_kwargs"]
    if not any(kind.__name__ == "GRPOTrainer" for kind in kinds) or missing:
        lacking = f", which lacks {', '.join(missing)}" if kinds and missing else ""
        raise TypeError(
            f"TRLRollouts are the rollout_func of TRL 1.16's GRPOTrainer, and were called by a "
            f"{type(trainer).__name__}{lacking}"
        )


def _check_settings(trainer: Any) -> None:
    """Raises ValueError for settings and models that the engine cannot serve; says what to do."""
    on = {
        "use_vllm": getattr(trainer, "use_vllm", False),
        "use_transformers_continuous_batching": getattr(
            trainer, "use_transformers_continuous_batching", False
        ),
        "tools": trainer.tools and not trainer.environment_factories,
        "environment_factory": trainer.environment_factories,
    }
    for name, value in on.items():
        if value:
            raise ValueError(
                f"{name} is set beside rollout_func=TRLRollouts(), which generates whole "
                f"responses by itself: leave {name} out, {_INSTEAD}"
            )
    _check_spreading(trainer.accelerator)
    if getattr(trainer, "_is_vlm", False):
        raise ValueError(
            f"TRLRollouts read texts, and {type(trainer.processing_class).__name__} is a processor "
            f"of images too: train a language model with its tokenizer, {_INSTEAD}"
        )
    sampled_at = trainer.generation_kwargs["temperature"]
    if sampled_at != trainer.temperature:
        raise ValueError(
            f"generation_kwargs has temperature={sampled_at}, the policy that is trained has "
            f"{trainer.temperature}: leave it out and set GRPOConfig(temperature={sampled_at}), so "
            "that log-probs are of the policy that is sampled"
        )


def _check_spreading(accelerator: Any) -> None:
    """Raises ValueError for weights that the engine cannot gather: FSDP1's, ZeRO-3's."""
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "TRLRollouts need FSDP2, and FSDP1 was asked for: set fsdp_version: 2 (accelerate "
            f"launch --fsdp_version 2), {_INSTEAD}"
        )
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage == 3:
        raise ValueError(
            "TRLRollouts need whole weights, and DeepSpeed's ZeRO-3 spreads them: use FSDP2 "
            f"(accelerate launch --use_fsdp --fsdp_version 2) or zero_stage: 2, {_INSTEAD}"
        )


def _check_wrapped(trainer: Any, model: Any) -> None:
    """Raises ValueError for a model whose gradients several processes do not exchange: accelerate
    prepares it for transformers' ``evaluate()``, and not again for training."""
    prepared = getattr(model, "_is_accelerate_prepared", False)
    several = trainer.accelerator.num_processes > 1 and not is_spread(model)
    if several and model.training and prepared and trainer.model_wrapped is model:
        raise ValueError(
            "evaluate() was called before train(), and transformers would now train another model "
            "in each process, without DDP: leave it out and set eval_on_start=True, or evaluate by "
            "a trainer of its own"
        )


def _params(trainer: Any, model: Any) -> SamplingParams:
    arguments: Mapping[str, Any] = trainer.generation_kwargs
    params = sampling_params(arguments, model)
    if isinstance(params, str):
        origin = "generation_kwargs" if params in arguments else "the model's generation_config"
        value = arguments.get(params, getattr(model.generation_config, params, None))
        raise ValueError(
            f"{origin} has {params}={value!r:.80}, which the rollout engine does not do: leave it "
            f"out, {_INSTEAD}"
        )
    return params
