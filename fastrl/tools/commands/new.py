"""``fastrl new``: a folder with a script, a recipe, a reward and its test, which trains at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from fastrl.run.files import new_folder, write_files
from fastrl.run.terminal import activation, plain, run_console
from fastrl.tools.commands.flags import UsageError, own_parser

_TEMPLATE = Path(__file__).parent / "template"  # names of code and dotfiles end in .txt here
_NEXT = """\
written: {name}

  {activation}cd {name}
  pytest                    # the reward's test (pip install pytest)
  fastrl grpo recipe.yaml   # half a minute on a CPU, to runs/recipe
  python train.py           # the same in Python, to runs/train

README.md says what is what, and how to train your own model on your own reward.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("new", __doc__)
    parser.add_argument(
        "name", metavar="NAME", help="The new folder, here: letters, digits, - and _."
    )
    return parser


def run_new(arguments: Sequence[str]) -> None:
    """Writes the folder, all of it or nothing, and prints what to do in it; raises UsageError for a
    name that is taken or not allowed."""
    flags = make_parser().parse_args(list(arguments))
    name: str = flags.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UsageError(
            f"NAME is {name!r}: name a folder to be made here, of letters, digits, - and _, which "
            "begins with a letter or a digit"
        )
    path = Path(name)
    if path.exists() or path.is_symlink():
        raise UsageError(f"{name} is here already: choose another name, or remove it")
    with new_folder(path) as folder:
        write_files(folder, _files(name))
        _save(folder / "model")
    text = _NEXT.format(name=name, activation=activation())
    run_console().print(plain(text), soft_wrap=True, end="")


def _files(name: str) -> dict[str, str]:
    files = {}
    for path in sorted(x for x in _TEMPLATE.rglob("*") if x.is_file()):
        text = path.read_text(encoding="utf-8").replace("$name", name)
        files[path.relative_to(_TEMPLATE).as_posix().removesuffix(".txt")] = text
    return files


def _save(folder: Path) -> None:
    """Saves an untrained GPT-2 of two layers: a token per printable ASCII character or newline."""
    from tokenizers import Tokenizer, models
    from tokenizers.decoders import Fuse
    from tokenizers.pre_tokenizers import Split
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from fastrl.core import set_seed

    vocabulary = ["<pad>", "<eos>", "\n", *map(chr, range(ord(" "), 127))]
    ids = {token: i for i, token in enumerate(vocabulary)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = Split("", "isolated"), Fuse()
    set_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(ids),
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
