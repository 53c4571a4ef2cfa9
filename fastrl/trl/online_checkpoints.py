"""What checkpoints of GRPO and RLOO hold beside those of every trainer: how far the run is in its
responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.registry import own_functions
from fastrl.rewards.identity import identities_of
from fastrl.run.checkpoints import BadCheckpoint
from fastrl.samples import Samples
from fastrl.trainers.base import BaseTrainer
from fastrl.trainers.supervised import trained_identity


class OnlineCheckpoints(BaseTrainer):
    """The state of a trainer that samples responses, of which it needs what is declared here."""

    args: Any
    uses: int
    reward_func_names: list[str]
    reward_funcs: list[Any]
    log_completions: bool
    _step: int
    _generations: dict[str, int]
    _buffer: list[Samples] | None
    _further: Any
    _ledger: Any
    _logs: Any
    _sampler: Any
    _scorer: Any
    _follow: Any

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), **trained_identity(self)}

    def own_settings(self) -> dict[str, Any]:
        code = identities_of(zip(self.reward_func_names, self.reward_funcs, strict=True))
        return {**super().own_settings(), "reward_funcs": self.reward_func_names, **code}

    def own_code(self) -> dict[str, Any]:
        advantage = getattr(self.args, "advantage", None)
        loss = getattr(self.args, "loss_type", None)
        return {**super().own_code(), **identities_of(own_functions(loss, advantage))}

    def own_state(self) -> dict[str, Any]:
        if self._ledger is not None:  # what it holds is not drawn again
            self._ledger.flush()
        return {
            **super().own_state(),
            "online": {
                "step": self._step,
                "generations": self._generations["train"],
                "uses": self.uses,
                "buffer": None if self._buffer is None else [x.state() for x in self._buffer],
                "table": self._logs.state() if self.log_completions else None,
                "further": None if self._further is None else self._further.state_dict(),
                "responder": {"rooms": self._sampler.rooms()},
                "reuses": self._scorer.reuses,
                "reference": self._follow.state(),
            },
        }

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        self._step, self._buffer, self._generations["train"] = 0, None, 0
        own = None if resumed is None else resumed["own"]["online"]
        if self._ledger is not None:
            self._ledger.begin(0 if own is None else own["generations"])
        if own is None:
            return
        self._step, self._scorer.reuses = own["step"], own["reuses"]
        self._generations["train"] = own["generations"]
        if own["buffer"] is not None:
            self._buffer = [Samples.of_state(x) for x in own["buffer"]]
        if own.get("table"):
            self._logs.load(own["table"])
        self._sampler.reserve(own["responder"]["rooms"])
        if self._further is not None and own.get("further"):
            self._further.load_state_dict(own["further"])
        self._follow.load(own["reference"])

    def joined_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Where responses are sampled next, without the metrics since the last log.

        Raises:
            BadCheckpoint: in the midst of responses that the processes have sampled.
        """
        own, args = states[0]["online"], self.args
        uses = own["uses"]
        if own["step"] % uses:
            raise BadCheckpoint(
                f"the checkpoint is {own['step'] % uses} of {uses} batches into what each process "
                "has sampled: resume it with as many processes, or from a checkpoint between two "
                f"generations (save_steps × {args.gradient_accumulation_steps} a multiple of "
                f"{uses})"
            )
        online = {**own, "step": 0, "buffer": None}
        return {**super().joined_state(states), "online": online}

    def own_mark(self) -> dict[str, Any]:
        made = self._generations["train"]
        further = None if self._further is None else self._further.state_dict()
        kept = self._step, made, self._buffer, self._sampler.rooms(), further
        return {**super().own_mark(), "online": kept}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        super().own_rewind(mark)
        self._step, made, self._buffer, rooms, further = mark["online"]
        if self._further is not None:
            self._further.load_state_dict(further)
        self._generations["train"] = made
        self._sampler.reserve(rooms)
