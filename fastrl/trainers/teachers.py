"""The teachers of trainers that learn from responses: their models, and what they read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.config import TeacherArguments, parse_json
from fastrl.data.batch import check_token_lists
from fastrl.data.chat import TEMPLATE_COLUMNS, check_messages, content_text, is_chat, templates_of
from fastrl.data.choose_padding import Packing, logprobs_and_values
from fastrl.data.prompt_ids import ids_of_prompts, token_ids
from fastrl.data.tables import ROW, is_stream
from fastrl.data.token_batch import Padding
from fastrl.learn.asked_teacher import AskedTeacher
from fastrl.learn.ref_model import (
    AdapterOffRefModel,
    CopyRefModel,
    Follow,
    LiveRefModel,
    OffloadRefModel,
    OwnAdapterRefModel,
    ReferenceSettings,
    RefModel,
    StartAdapterRefModel,
    choose_ref_model,
)
from fastrl.learn.ref_model.adapter import base_weights, trained_before
from fastrl.learn.scorer import check_tokens
from fastrl.learn.teacher import Teachers, TeacherSettings
from fastrl.models import CausalLMPolicy, PreTrainedModelWrapper
from fastrl.models.adapter_base import moves_base
from fastrl.models.adapters import TEACHER_ADAPTER
from fastrl.models.layout import layout_of
from fastrl.models.load import load_language_model, load_tokenizer
from fastrl.models.model_files import ADAPTER_CONFIG, find_file, is_path
from fastrl.models.scoring import PassLimit
from fastrl.models.utils import base_of, checksum
from fastrl.run.processes import Processes
from fastrl.samples import Samples
from fastrl.trainers.prompt_room import PromptRoom
from fastrl.trainers.reference import model_of

TEACHER_COLUMNS = PROMPT, CONTEXT = "teacher_prompt", "privileged_context"
# Why a GradScaler does not go with a teacher.
SCALED = "scales the loss before its gradient, and a teacher's term has its gradient by then"
_OWN = "the policy"
_AT_A_TIME = 1 << 10  # rows that are encoded together
# Texts whose ids tell one tokenizer from another: words, numbers, code, scripts, blanks.
_PROBES = (
    "The quick brown fox jumps over 13 lazy dogs, don't they?",
    "def f(x):\n    return x ** 2  # 3.14159\n",
    "Größe naïve 東京 Привет مرحبا 🙂\t\n\n  end",
)


def teachers_of(
    given: Any,
    args: Any,
    policy: PreTrainedModelWrapper,
    tokenizer: Any,
    *,
    coef: float,
    fresh: bool,
    refused: Mapping[str, bool],
) -> TeacherModels | None:
    """The models of the teachers that a trainer's settings and arguments ask for; None without.

    Args:
        coef: the weight of what is learned of teachers; 0: nothing is.
        refused: what does not go with a teacher, in words, and whether the trainer has it.

    Raises:
        ValueError: a teacher, and nothing to learn of it; what is refused; as
            :class:`TeacherModels`.
    """
    if not coef:
        if given is not None:
            raise ValueError(
                "teacher_model is given and teacher_kl_coef is 0, so that nothing is learned of "
                "it: set teacher_kl_coef, or leave teacher_model out"
            )
        return None
    for message, applies in refused.items():
        if applies:
            raise ValueError(message)
    return TeacherModels(given, args, policy, tokenizer, fresh)


class TeacherModels:
    """The models of a trainer's teachers.

    Args:
        given: ``teacher_model``: None (the policy's own weights, by ``teacher_model_kind``), a
            model, a path or Hub id of a model or of an adapter on the policy's base, a function,
            see :class:`fastrl.learn.asked_teacher.AskedTeacher`, or a dict of these by the names in
            ``teacher_column``.
        fresh: whether the policy's adapter, if any, is new.

    Attributes:
        references: the teachers by name.
        follow: moves a teacher that is an average of the policy's weights.
        vocabulary: the number of tokens, where heads have different numbers of rows; else None.

    Raises:
        ValueError: a teacher with another tokenizer, or with fewer rows in its head than there are
            tokens; settings that do not go together; an adapter that cannot be loaded; a function
            that is to give rewards.
    """

    def __init__(
        self,
        given: Any,
        args: Any,
        policy: PreTrainedModelWrapper,
        tokenizer: Any,
        fresh: bool,
    ):
        args.check_teacher()
        self.args, self._policy, self.tokenizer = args, policy, tokenizer
        named = given if isinstance(given, Mapping) else {_OWN if given is None else "": given}
        if isinstance(given, Mapping) != (args.teacher_column is not None):
            raise ValueError(
                "a dict of teachers, by the names in a column, and teacher_column, the column, go "
                "together: give both or neither"
            )
        if not named:
            raise ValueError("teacher_model is an empty dict: name the teachers")
        if isinstance(given, Mapping) and None in given.values():
            raise ValueError(
                "a dict of teachers has None, which would be the policy's own weights: these are a "
                "teacher alone, without teacher_model; pass a copy of the model in the dict"
            )
        self.sizes = {policy.pretrained_model.get_output_embeddings().weight.shape[0]}
        self.references: dict[str, RefModel] = {}
        for number, (name, model) in enumerate(named.items()):
            label = name or (model if isinstance(model, str) else _kind_of(model))
            if model is None:
                self.references[label] = self._own(fresh)
            else:
                self.references[label] = self._given(model, label, number)
        if args.teacher_model_kind != "base" and None not in named.values():
            raise ValueError(
                f"teacher_model_kind={args.teacher_model_kind!r} chooses among the policy's own "
                "weights, and teacher_model is given: leave one of them out"
            )
        self.vocabulary = None if len(self.sizes) == 1 else len(tokenizer)
        # Heads of one size are compared row by row, whatever a tokenizer has beyond them.
        if self.vocabulary is not None and min(self.sizes) < self.vocabulary:
            mine = policy.pretrained_model.get_output_embeddings().weight.shape[0]
            whose = "the policy's" if mine == min(self.sizes) else "a teacher's"
            raise ValueError(
                f"{whose} head has {min(self.sizes)} rows, and the tokenizer {len(tokenizer)} "
                "tokens: teacher and policy must have a row for each token"
            )
        own = self.references.get(_OWN)
        averaged = own is not None and args.teacher_model_kind == "ema"
        every = args.teacher_sync_steps if averaged else 0
        self.follow = Follow(own, every, args.teacher_update_rate)

    def _own(self, fresh: bool) -> RefModel:
        """The policy's own weights: those that it begins with, has, or had on average."""
        kind, policy = self.args.teacher_model_kind, self._policy
        if kind == "live":
            return LiveRefModel(policy)
        if policy.is_peft_model:
            configs = policy.pretrained_model.peft_config.values()
            begun = trained_before(policy.pretrained_model) and not fresh
            if kind == "base" and not begun and not any(map(moves_base, configs)):
                return AdapterOffRefModel(policy)
            return StartAdapterRefModel(policy, TEACHER_ADAPTER)
        mode = "offload" if self.args.teacher_placement == "host" else "copy"
        settings = ReferenceSettings(reference=mode)
        if kind == "ema":
            rate, every = self.args.teacher_update_rate, self.args.teacher_sync_steps
            settings = settings._replace(sync_ref_every=every, ref_ema=rate)
        return choose_ref_model(settings, policy)

    def _given(self, model: Any, name: str, number: int) -> RefModel:
        policy = self._policy
        hub = {**parse_json("teacher_model_init_kwargs", self.args.teacher_model_init_kwargs)}
        revision = getattr(self.args, "teacher_model_revision", None)
        trusted = getattr(self.args, "trust_remote_code", False)
        if is_path(model):
            if revision is not None:
                hub.setdefault("revision", revision)
            own = {k: v for k, v in hub.items() if k in ("token", "cache_dir", "revision")}
            if policy.is_peft_model and find_file(str(model), ADAPTER_CONFIG, own):
                return OwnAdapterRefModel(policy, str(model), f"{TEACHER_ADAPTER}_{number}", own)
            if trusted:
                hub.setdefault("trust_remote_code", True)
            loaded = load_language_model(model, **hub)
        else:
            if hub:
                raise ValueError(
                    "teacher_model_init_kwargs are for a teacher that is loaded by its path, and "
                    f"{name!r} is loaded already: leave them out"
                )
            loaded = getattr(model, "pretrained_model", model)
        is_model = isinstance(loaded, nn.Module)
        if not is_model and (not callable(loaded) or hasattr(loaded, "get_vocab")):
            raise TypeError(
                "a teacher is a model, a path, a function or, with teacher_column, a dict of these "
                f"by name, got a {_kind_of(loaded)}"
            )
        if not is_model:
            if self.args.teacher_kl_in == "reward":
                raise ValueError(
                    f"teacher {name!r} is a function, which need not name the token that was "
                    "sampled, and teacher_kl_in='reward' reads its log-prob: choose 'loss'"
                )
            return AskedTeacher(name, loaded, self.args.teacher_rest, len(self.tokenizer))
        if loaded in (policy.pretrained_model, base_of(policy)):
            raise ValueError(
                f"teacher {name!r} is the model that is trained: leave teacher_model out, and "
                "choose teacher_model_kind='live', or 'base' for the model as training begins"
            )
        head = getattr(loaded, "get_output_embeddings", lambda: None)()
        if head is None or loaded.config.is_encoder_decoder:
            raise TypeError(
                f"teacher {name!r} is a {type(loaded).__name__}, which is no causal language "
                "model: load it with AutoModelForCausalLM"
            )
        weight = head.weight
        plain = weight.is_floating_point() and weight.device.type != "meta"
        if plain and not weight.isfinite().all():
            raise ValueError(
                f"the head of teacher {name!r} has weights that are NaN or infinite: load a model "
                "whose training went well"
            )
        check_same_tokenizer(self.tokenizer, loaded, name, trusted)
        self.sizes.add(head.weight.shape[0])
        teacher = CausalLMPolicy(loaded)
        if self.args.teacher_placement == "host":
            return OffloadRefModel(teacher)
        return CopyRefModel(teacher)

    def refuse_itself(
        self,
        live_alone: bool,
        remedy: str = "give the data a column teacher_prompt or privileged_context (or name it: "
        "fastrl distill --hint-column)",
    ) -> None:
        """Raises ValueError where teachers read the policy's prompts, and the one teacher is the
        policy as it is, or unless ``live_alone``, as it begins."""
        own = self.references.get(_OWN)
        name, *others = self.references
        if own is None and not others and not live_alone and self._begins_as_teacher():
            raise ValueError(
                f"teacher {name!r} has the very weights that the policy begins with, and reads the "
                f"same prompts, so that there is nothing to learn of it: {remedy}, or pass another "
                "teacher_model"
            )
        itself = self.is_live
        if own is not None and not itself and not live_alone:
            peft = self._policy.pretrained_model if self._policy.is_peft_model else None
            itself = not (isinstance(own, AdapterOffRefModel) and trained_before(peft))
        if itself:
            raise ValueError(
                f"the teacher is the policy itself (teacher_model_kind="
                f"{self.args.teacher_model_kind!r}) behind the same prompts, so that there is "
                f"nothing to learn of it: {remedy}, or pass teacher_model"
            )

    @property
    def is_live(self) -> bool:
        """Whether a teacher is the policy as it is."""
        return isinstance(self.references.get(_OWN), LiveRefModel)

    def _begins_as_teacher(self) -> bool:
        """Whether the one teacher is a model with the policy's weights, or an adapter with those of
        the policy's."""
        (reference,) = self.references.values()
        model, adapts = self._policy.pretrained_model, self._policy.is_peft_model
        if isinstance(reference, OwnAdapterRefModel):
            return reference.equals_active()
        if reference.model is None or (adapts and trained_before(model)):
            return False
        own = base_weights(model)
        named = dict(reference.model.pretrained_model.named_parameters())
        return own.keys() == named.keys() and all(
            x.shape == (y := named[name]).shape and torch.equal(x.detach().to(y), y)
            for name, x in own.items()
        )

    def read_by(self) -> list[Any]:
        """The language models that read teachers' prompts."""
        read = [x for x in self.references.values() if not isinstance(x, AskedTeacher)]
        return [(x.model or self._policy).pretrained_model for x in read]

    @property
    def functions(self) -> dict[str, AskedTeacher]:
        """The teachers that are functions, by name."""
        return {n: x for n, x in self.references.items() if isinstance(x, AskedTeacher)}

    def asked(self, samples: Samples, columns: Mapping[str, Sequence[Any]]) -> Samples:
        """The samples with what teachers that are functions say of them.

        Args:
            columns: the data's other columns.
        """
        if not self.functions:
            return samples
        names, numbers = list(self.references), samples.teachers or [0] * len(samples)
        nothing = [(x.new_empty(len(x), 0), torch.empty(len(x), 0)) for x in samples.sequences]
        found = dict(enumerate(nothing))
        for name, teacher in self.functions.items():
            chosen = [i for i, number in enumerate(numbers) if names[number] == name]
            if chosen:
                own = {column: [values[i] for i in chosen] for column, values in columns.items()}
                part = samples.select(chosen)
                read = part.teacher_prompt_ids or part.prompt_ids
                said = teacher.ask(read, part.sequences, part.learned, own)
                found |= zip(chosen, said, strict=True)
        ids, logprobs = map(list, zip(*(found[i] for i in range(len(samples))), strict=True))
        return replace(samples, likely_ids=ids, likely_logprobs=logprobs)

    def identity(self) -> str:
        """What must be the same in a run that resumes: modes, and weights that do not move."""
        of_each = []
        for name, reference in self.references.items():
            moves = name == _OWN and self.args.teacher_model_kind != "base"
            weights = {} if moves else reference.own_weights()
            of_each.append(f"{name}: {reference.mode} {checksum(weights)}")
        return ", ".join(of_each)

    def separate(self, accelerator: Any) -> list[Any]:
        """The teachers that are models of their own, without wrappers."""
        of_own = (model_of(x, accelerator) for x in self.references.values())
        return [model for model in of_own if model is not None]

    def number(self, name: Any, where: str) -> int:
        """The number of the teacher ``name``; ``where`` it is named is for the error."""
        names = list(self.references)
        if name not in names:
            raise ValueError(
                f"{where} names the teacher {name!r}, and teacher_model has {', '.join(names)}"
            )
        return names.index(name)

    def columns_of(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        of_teachers: Any,
        names: Sequence[str] | None,
    ) -> dict[str, Any]:
        """The columns ``teacher_prompt_ids`` and ``teachers`` of a step's samples, checked.

        Args:
            queries, responses: of the policy, checked.
            of_teachers: the queries that teachers read, as token ids; None: the policy's.
            names: the samples' teachers; None: all have the one that there is.

        Raises:
            ValueError: names the argument and the element.
        """
        if of_teachers is None:
            self.refuse_itself(True, "pass teacher_queries")
            read = queries
        else:
            size = self._policy.config.get_text_config().vocab_size
            read = of_teachers = check_token_lists(
                of_teachers, responses, vocab_size=size, name="teacher_queries"
            )[0]
        if (names is not None) != (self.args.teacher_column is not None):
            raise ValueError(
                "teachers, the names of the samples' teachers, are for a teacher_model that is a "
                "dict, and needed then: " + ("leave them out" if names else "pass them")
            )
        if names is not None and len(names) != len(responses):
            raise ValueError(f"teachers has {len(names)} elements, responses {len(responses)}")
        numbers = None
        if names is not None:
            numbers = [self.number(name, f"teachers[{i}]") for i, name in enumerate(names)]
        name = "teacher_queries[{0}] and responses[{0}]".format
        self.check_readable(read, responses, numbers, name)
        return {"teacher_prompt_ids": of_teachers, "teachers": numbers}

    def check_readable(
        self,
        prompts: Sequence[Tensor],
        responses: Sequence[Tensor],
        numbers: Sequence[int] | None,
        name_of: Callable[[int], str],
    ) -> None:
        """Raises ValueError for a response that has more tokens, with what its teacher reads, than
        the teacher's context or a forward pass may have; or a token that a head or an embedding has
        no row for, as another model has more rows than the tokenizer tokens.

        Args:
            numbers: of the samples' teachers; None: all have the first.
            name_of: names a sample, for messages.
        """
        references = list(self.references.values())
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            reference = references[numbers[i] if numbers else 0]
            if isinstance(reference, AskedTeacher):
                continue
            layout = layout_of((reference.model or self._policy).pretrained_model)
            limit = layout.exceeded(len(prompt), len(response))
            if limit is not None:
                raise ValueError(
                    f"{name_of(i)} have {len(prompt)} + {len(response)} tokens, beyond the "
                    f"teacher's {limit}: shorten what the teacher reads"
                )
            rows = min(self.sizes)
            if len(self.sizes) > 1 and len(response) and int(response.max()) >= rows:
                raise ValueError(
                    f"{name_of(i)} have the token {int(response.max())}, a row of padding of the "
                    f"model that sampled it, and another model has {rows} rows: bring both to the "
                    "same number by model.resize_token_embeddings"
                )
        most = self.args.micro_batch_tokens
        check_tokens(most, list(map(len, prompts)), list(map(len, responses)), name_of)

    def placed(
        self,
        policy: Any,
        accelerator: Any,
        settings: TeacherSettings,
        lowest: torch.dtype,
        own_padding: Callable[[], Padding],
        processes: Processes,
    ) -> Teachers:
        """Moves the teachers to where they compute, once the policy is prepared; returns what runs
        them.

        Args:
            lowest: the lowest precision in which forward passes compute.
            own_padding: returns how the policy's batches are laid out.
        """
        for reference in self.references.values():
            reference.place(policy, accelerator)
        asks = lambda: self.args.padding_free  # noqa: E731
        autocast = accelerator.autocast
        packing = accelerator.device, lowest, autocast, processes.any, asks

        def padding_of(reference: RefModel) -> Callable[[], Padding]:
            if reference.model is None:
                return own_padding
            packs = Packing(*packing, logprobs_and_values)
            return lambda: packs.padding(reference.model)

        paddings = [padding_of(x) for x in self.references.values()]
        settings = settings._replace(vocabulary=self.vocabulary)
        return Teachers(self.references, paddings, settings, autocast, processes)


class TeacherPrompts:
    """What teachers read in place of the policy's prompts, and which teacher a prompt has.

    Args:
        models: the teachers.
        template: further arguments of the chat template.
        most: the most tokens of a response.
        limit: the setting that ``most`` is.

    Attributes:
        longest: the most tokens of a prompt that :meth:`check` has seen; 0: teachers read the
            policy's prompts, or the rows are not known yet.
    """

    def __init__(
        self,
        models: TeacherModels,
        template: Mapping[str, Any],
        most: int | None,
        limit: str = "max_completion_length",
    ):
        self.models, self._template = models, template
        self.args: TeacherArguments = models.args
        self._tokenizer = models.tokenizer
        of_a_pass = models.args.micro_batch_tokens
        cut = getattr(self.args, "max_prompt_length", None)
        self._rooms = [
            PromptRoom(
                model, most, self._tokenizer, template, of_a_pass, cut, limit, "the teacher's"
            )
            for model in models.read_by()
        ]
        self.longest = 0

    def check(self, data: Any, name: str, as_given: bool = True) -> None:
        """Checks all rows of a data set; those of a stream are checked as they are learned from.

        Args:
            as_given: whether the policy answers the data's prompts, and not others in their place.

        Raises:
            ValueError: names the row whose teacher's prompt is absent or leaves no room, or whose
                teacher is not known; what :meth:`PromptRoom.check_rows` does of the policy's
                prompts, where teachers read these.
        """
        names = getattr(data, "column_names", None)
        if names is None or is_stream(data) or data.format["type"] == "custom":
            return
        read = {"prompt", ROW, PROMPT, CONTEXT, self.args.teacher_column, *TEMPLATE_COLUMNS}
        if as_given and not {PROMPT, CONTEXT} & {*names}:
            for room in self._rooms:
                room.check_rows(data, name)
        rows = data.with_format(None).select_columns([x for x in names if x in read])
        for first in range(0, len(rows), _AT_A_TIME):
            part = rows.select(range(first, min(first + _AT_A_TIME, len(rows))))
            columns = {column: list(part[column]) for column in part.column_names}
            prompts = columns.pop("prompt")
            numbers = columns.pop(ROW, range(first, first + len(part)))
            found = self._of(prompts, columns, numbers, [f"row {i} of {name}" for i in numbers])
            lengths = map(len, found.get("teacher_prompt_ids", ()))
            self.longest = max(self.longest, *lengths, 0)

    def check_own(self, prompts: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises ValueError for a prompt of the policy's, as token ids, that its teachers, who read
        it, have no room for."""
        for ids, name in zip(prompts, names, strict=True):
            for room in self._rooms:
                room.check(ids, name)

    def of(self, samples: Samples, places: Sequence[str] = ()) -> dict[str, Any]:
        """The columns ``teacher_prompt_ids`` and ``teachers`` of samples. Raises ValueError as
        :meth:`check` does; ``places`` name the samples' prompts."""
        places = places or [f"prompt {i}, {x!r:.80}," for i, x in enumerate(samples.prompts)]
        rows = samples.prompt_rows or range(len(samples))
        return self._of(samples.prompts, samples.columns or {}, rows, places)

    def arguments(self, samples: Samples) -> dict[str, Any]:
        """Arguments of ``PPOTrainer.step`` for samples."""
        found = self.of(samples)
        numbers, names = found.get("teachers"), list(self.models.references)
        named = None if numbers is None else [names[i] for i in numbers]
        return {"teacher_queries": found.get("teacher_prompt_ids"), "teachers": named}

    def _of(
        self,
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
        places: Sequence[str],
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        count = len(prompts)
        column = self.args.teacher_column
        if column is not None:
            if column not in columns and count:
                raise ValueError(
                    f"{places[0]} has no column {column!r}, teacher_column, which names its teacher"
                )
            values = columns.get(column, [None] * count)
            named = (f"{place}: column {column!r}" for place in places)
            found["teachers"] = list(map(self.models.number, values, named))
        if PROMPT in columns or CONTEXT in columns:
            texts, contexts = (columns.get(x, [None] * count) for x in (PROMPT, CONTEXT))
            read = [
                self._read(*each) for each in zip(prompts, texts, contexts, places, strict=True)
            ]
            found["teacher_prompt_ids"] = self._encoded(read, columns, rows, places)
        return found

    def _read(self, prompt: Any, text: Any, context: Any, where: str) -> Any:
        """What the teacher reads in place of a prompt."""
        if text is not None and context is not None:
            raise ValueError(
                f"{where} has both {PROMPT} and {CONTEXT}, and a teacher's prompt is made of one "
                "of them: leave one of the columns out"
            )
        if text is not None:
            return text
        if context is None:
            raise ValueError(
                f"{where} has neither {PROMPT} nor {CONTEXT}: a teacher's prompt is made of one of "
                "them; leave both columns out where teachers read the policy's prompts"
            )
        if not context or (isinstance(context, str) and not context.strip()):
            raise ValueError(
                f"{CONTEXT} of {where} is empty, so that its teacher would read no more than the "
                "policy does: fill it, or leave the row out"
            )
        if is_chat(context):  # messages, or the content blocks of one
            has_roles = any("role" in each for each in context)
            messages = context if has_roles else [{"role": "user", "content": context}]
            check_messages(messages, f"{CONTEXT} of {where}")
            context = "\n".join(map(content_text, messages))
        if isinstance(context, list | tuple | Mapping):
            raise ValueError(
                f"{where}: {CONTEXT} is a {type(context).__name__}: it must be a text, or messages "
                "with their contents"
            )
        context = str(context)
        if isinstance(prompt, str):
            return self._filled(prompt, context)
        asked = [i for i, message in enumerate(prompt) if message.get("role") == "user"]
        if not asked:
            raise ValueError(f"{where} has no message of a user to put {CONTEXT} into")
        last = asked[-1]
        told = {**prompt[last], "content": self._filled(content_text(prompt[last]), context)}
        return [*prompt[:last], told, *prompt[last + 1 :]]

    def _filled(self, prompt: str, context: str) -> str:
        # Not str.format, which would read braces of the prompt's.
        parts = self.args.teacher_prompt_template.split("{privileged_context}")
        return context.join(part.replace("{prompt}", prompt) for part in parts)

    def _encoded(
        self,
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
        places: Sequence[str],
    ) -> list[Tensor]:
        templates = templates_of(prompts, columns, rows, self._template)
        names = [f"the teacher's prompt of {where}" for where in places]
        known: dict[Any, Tensor] = {}  # groups share theirs
        keys = [repr((x, y)) for x, y in zip(prompts, templates, strict=True)]
        first = {key: i for i, key in reversed([*enumerate(keys)])}
        chosen = sorted(first.values())
        ids = ids_of_prompts(
            [prompts[i] for i in chosen],
            self._tokenizer,
            [templates[i] for i in chosen],
            [names[i] for i in chosen],
            self.args.longest_teacher_prompt,
        )
        for i, each in zip(chosen, ids, strict=True):
            for room in self._rooms:
                room.check(each, names[i])
            known[keys[i]] = each
        return [known[key] for key in keys]


class Teaching:
    """Teachers that run, and how a policy learns of them.

    Args:
        models: the teachers' models; ``teachers`` runs them.
        pad_token: the id that pads.

    Attributes:
        in_reward: whether they are in the rewards, and not in the loss.
        in_loss: the teachers, where the loss has their term; else None.
    """

    def __init__(
        self, models: TeacherModels, teachers: Teachers, pad_token: int, device: torch.device
    ):
        self.models, self.teachers = models, teachers
        self.pad_token, self.device = pad_token, device
        self.in_reward = models.args.teacher_kl_in == "reward"
        self.in_loss = None if self.in_reward else teachers

    def log_probs(self, samples: Samples, limit: PassLimit, *, shared: bool) -> list[Tensor]:
        """Log-probs of the responses' tokens by their teachers, see :meth:`Teachers.log_probs`."""
        options = {"shared": shared, "learned": self.in_reward}
        return self.teachers.log_probs(samples, self.pad_token, self.device, limit, **options)

    def reward_of(self, apart: Tensor) -> Tensor:
        """The part of the rewards that tokens have by log π_old - log π_teacher, ``apart``."""
        return -self.teachers.settings.coef * apart


def _kind_of(model: Any) -> str:
    """What a teacher without a name is called."""
    return getattr(model, "__name__", type(model).__name__)


def check_same_tokenizer(tokenizer: Any, model: Any, name: str, trusted: bool = False) -> None:
    """Compares the policy's tokenizer with the one saved with a teacher, by the tokens that both
    know and the ids that they give texts. A model that was not loaded from files has none to
    compare.

    Args:
        trusted: run the Python code that the teacher's files bring.

    Raises:
        ValueError: names the first token or text that has other ids.
    """
    path = getattr(model.config, "name_or_path", "") or ""
    if not path:
        return
    try:
        theirs = load_tokenizer(path, trust_remote_code=trusted)
    except (OSError, ValueError):
        warnings.warn(
            f"teacher {name!r}: no tokenizer is saved with {path}, so that nothing tells whether "
            "its tokens are the policy's: save it there",
            stacklevel=3,
        )
        return
    ours, others = tokenizer.get_vocab(), {i: x for x, i in theirs.get_vocab().items()}
    differ = [(i, token) for token, i in ours.items() if others.get(i, token) != token]
    if differ:
        i, token = min(differ)
        raise ValueError(
            f"teacher {name!r} has another tokenizer (vocab_size {len(others)}, the policy's "
            f"{len(ours)}): {token!r} is token {i} of the policy's, and {others[i]!r} of the "
            "teacher's. Divergences compare probabilities of the same tokens: take a teacher of "
            "the policy's family"
        )
    for text in _PROBES:
        mine, its = (token_ids(text, x).tolist() for x in (tokenizer, theirs))
        if mine != its:
            raise ValueError(
                f"teacher {name!r} has another tokenizer: {text!r} is {mine[:8]}… to the policy's "
                f"and {its[:8]}… to the teacher's: take a teacher of the policy's family"
            )
