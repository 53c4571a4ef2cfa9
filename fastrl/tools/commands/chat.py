"""``fastrl chat``: talks with a model, a run's or an adapter's, in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fastrl.run.terminal import visible
from fastrl.tools.commands.flags import UsageError, own_parser


def run_chat(arguments: Sequence[str]) -> int:
    """Answers each line that is typed, or read where the input is no terminal: as a turn, where the
    tokenizer has a chat template; else as a text that the model continues.

    ``/clear`` forgets the turns, ``/exit`` and Ctrl-D end the program, Ctrl-C ends a reply. Raises
    ValueError for ``--system`` without a chat template, and for a model that generates nothing."""
    flags = parse_flags(arguments)
    from fastrl.models.load import load_saved, load_tokenizer

    tokenizer = load_tokenizer(flags.model)
    if flags.system and tokenizer.chat_template is None:
        raise ValueError(
            f"--system needs a chat template, which the tokenizer of {flags.model} does not have"
        )
    model = load_saved(flags.model)
    if not hasattr(model, "generate") or not model.can_generate():
        raise ValueError(f"{flags.model} is a reward model, which writes nothing: name a policy")
    chat = Chat(_on_device(model), tokenizer, flags)
    turns = "a turn" if tokenizer.chat_template else "a text to go on with"
    shown = f"each line is {turns}; /clear forgets the turns, /exit or Ctrl-D ends, Ctrl-C cuts off"
    if sys.stdin.isatty():
        print(shown)
    for line in _lines():
        if line == "/clear":
            chat.clear()
        elif line == "/help":
            print(shown)
        elif line:
            chat.answer(line)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("chat", __doc__)
    parser.add_argument("model", metavar="MODEL", help="A model's folder, a run's, or a Hub id.")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="Most reply tokens [512].")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="0 takes the likeliest token [1]. The model's generation_config.json decides neither "
        "this nor top-p, and top-k is off, as in training; it decides the rest, such as penalties.",
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="Nucleus sampling [1].")
    parser.add_argument("--system", help="A system message, before the first turn.")
    return parser


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The command's flags.

    Raises:
        UsageError: no model, an unknown flag, or a number out of range.
    """
    flags = make_parser().parse_args(list(arguments))
    if flags.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, got {flags.max_new_tokens}")
    if flags.temperature < 0:
        raise UsageError(f"--temperature must be 0 or more, got {flags.temperature}")
    if not 0 < flags.top_p <= 1:
        raise UsageError(f"--top-p must lie in (0, 1], got {flags.top_p}")
    return flags


class Chat:
    """A conversation.

    Args:
        model: the model that generates, on its device.
        flags: the flags that :func:`parse_flags` returns.
    """

    def __init__(self, model: Any, tokenizer: Any, flags: argparse.Namespace):
        self.model, self.tokenizer, self.flags = model, tokenizer, flags
        self.reads_apart = bool(getattr(model.config, "is_encoder_decoder", False))
        self.turns: list[dict[str, str]] = []
        # A typed character that the tokenizer does not know may be its pad token; no row is padded.
        model.config.pad_token_id = None
        self.clear()

    def clear(self) -> None:
        """Forgets all turns, but for the system message."""
        system = self.flags.system
        self.turns = [{"role": "system", "content": system}] if system else []

    def answer(self, line: str) -> None:
        """Prints the reply to a line as it is written; with a chat template keeps both as turns."""
        import torch
        from transformers import GenerationConfig, TextStreamer

        from fastrl.data.encode import encode_prompt

        class Reply(TextStreamer):
            text = ""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                self.text += text
                print(visible(text), end="\n" if stream_end else "", flush=True)

        turns, flags = [*self.turns, {"role": "user", "content": line}], self.flags
        message = line if self.tokenizer.chat_template is None else turns
        _, prompt = encode_prompt(message, self.tokenizer, closed=self.reads_apart)
        ids = torch.tensor([prompt], device=self.model.device)
        room = self._room(len(prompt))
        if room < 1:
            print("fastrl: the conversation is longer than the model's context: /clear forgets it")
            return
        defaults = self.model.generation_config
        defaults.max_length = None  # --max-new-tokens acts instead; the model's other settings act
        sampling = {"do_sample": False}
        if flags.temperature > 0:
            # top_k=0 as in training: else the model's file, or transformers' 50, would act.
            options = {"temperature": flags.temperature, "top_p": flags.top_p, "top_k": 0}
            sampling = {"do_sample": True, **options}
        config = GenerationConfig(
            max_new_tokens=min(flags.max_new_tokens, room),
            eos_token_id=defaults.eos_token_id or self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=defaults.bos_token_id,
            decoder_start_token_id=defaults.decoder_start_token_id,
            **sampling,
        )
        reply = Reply(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=reply,
            )
        except KeyboardInterrupt:
            print(" …")
        if self.tokenizer.chat_template is not None:
            self.turns = [*turns, {"role": "assistant", "content": reply.text}]

    def _room(self, prompt: int) -> int:
        """How many tokens of the model's context are left; an encoder–decoder's reply has all."""
        limit = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        return limit if self.reads_apart else limit - prompt


def _lines() -> Iterator[str]:
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown) if shown else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:  # the user leaves a line that was being typed
            print()
            continue
        if (not shown and not line) or line.strip() == "/exit":
            return
        yield line.strip()


def _on_device(model: Any) -> Any:
    import torch

    if torch.cuda.is_available() and not hasattr(model, "hf_device_map"):
        model = model.to("cuda")
    return model.eval()
