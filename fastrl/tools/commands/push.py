"""``fastrl push``: uploads a model's folder to the Hugging Face Hub, with its card."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from fastrl.run.hub import upload_folder, uploaded_files
from fastrl.run.model_card import card_for_repository
from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands.flags import own_parser


def run_push(arguments: Sequence[str]) -> int:
    """Uploads a model or an adapter in one commit; fastrl's card gets the repository's id. With
    ``--dry-run`` prints what would be uploaded, and touches no network. Raises FileNotFoundError
    without a folder, and ValueError for a name that no repository can have."""
    flags = make_parser().parse_args(list(arguments))
    from huggingface_hub.utils import validate_repo_id

    from fastrl.models.load import base_folder
    from fastrl.models.model_files import is_adapter, model_folder

    validate_repo_id(flags.repo)
    folder, console = model_folder(flags.folder), run_console()
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {flags.folder}: name a model's, or a run's")
    card = card_for_repository(folder, flags.repo, flags.license)
    for name, size in uploaded_files(folder).items():
        console.print(plain(f"{size:>14,}  {name}"), soft_wrap=True)
    if is_adapter(folder) and os.path.isdir(base := base_folder(folder)):
        console.print(
            plain(
                f"warning: the adapter's base is a folder here, {base}, which nobody else has: "
                "upload it and write its id into adapter_config.json, or merge both (fastrl merge)"
            ),
            soft_wrap=True,
        )
    if card is None:
        console.print("warning: there is no README.md, so that the repository gets no card")
    if flags.dry_run:
        console.print(plain(f"nothing is uploaded to {flags.repo}: --dry-run"), soft_wrap=True)
        if card is not None:
            console.print(plain(f"\n{card}"), soft_wrap=True)
        return 0
    address = upload_folder(folder, flags.repo, card, private=flags.private or None)
    console.print(plain(f"uploaded: {address}"), soft_wrap=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("push", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="A model's folder, or that of a run.")
    parser.add_argument("repo", metavar="REPO", help="Where to, such as me/my-model.")
    parser.add_argument(
        "--private", action="store_true", help="Make a private repository, or refuse a public one."
    )
    parser.add_argument("--license", help="For the card, such as apache-2.0 [what the card says].")
    parser.add_argument(
        "--dry-run", action="store_true", help="Print files, sizes and card, and upload nothing."
    )
    return parser
