"""Checkpoints of a run: written as a whole, checked before they are read."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.run.files import free_name, new_folder, part_of, remove_folder, write_file
from fastrl.run.machine import differences, machine, other_draws, remedies, versions
from fastrl.run.processes import OneProcess, Processes

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
SAVE_EVERY, KEEP_LAST = 100, 2  # steps, and checkpoints; by default
LATEST = "latest"  # the value of "resume" that means the newest good one
FORMAT = 1  # the format's number, of the manifest and of what it lists
_NAME = re.compile(r"checkpoint-(\d+)")
_BLOCK = 1 << 22
# What must be the same in the run that resumes, and what to do where it is not.
_REMEDIES = {
    "trainer": "resume with the same trainer, task and loss",
    "model": "resume with the model that the run began with",
    "vocabulary": "resume with the model that the run began with",
    "tokenizer": "resume with the tokenizer that the run began with",
    "method": "resume with the same command and advantage",
    "optimizer": "resume with the optimizer that the run began with",
    "data": "resume with the data set that the run began with, and the settings of its tokens, "
    "lengths and held-out part, such as the seed",
    "frozen weights": "make the trainer from the model that the run began with",
    "critic": "make the trainer with the critic that the run began with",
    "teachers": "make the trainer with the teachers that the run began with",
    "reference": "make the trainer from the model (and reference) that the run began with",
}


OF_CODE = "code or weights of"  # begins names of settings that earlier versions' checkpoints lack
# Matches both warnings of changed settings, warn_of_changed_settings' and (", so") that of
# transformers_settings.warn_of_changes, where only settings of these names differ.
CODE_DIFFERS = rf"resume: settings differ .*\(({OF_CODE} .*?: \w+ → \w+(, )?)+\)(, so|: the run)"


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be resumed from."""


@dataclass(frozen=True)
class Kind:
    """Checkpoints of one kind of trainer.

    Attributes:
        file: a file that each of them has at its top, and checkpoints of the other kind lack.
        whose: the trainer that writes them.
        commands: the commands that write them and resume from them.
    """

    file: str
    whose: str
    commands: str


OF_PPO = Kind("state.json", "PPOTrainer", "fastrl ppo or grpo")
OF_TRANSFORMERS = Kind(
    "trainer_state.json", "transformers' Trainer", "fastrl sft, reward, align or distill"
)


class Checkpoints:
    """The folders ``checkpoint-N``, N the number of steps done.

    Each has a ``manifest.json``, written last, with sizes and checksums of its files, and the
    machine and the versions it was written with. A folder gets its name when the disk has all of
    it.

    Args:
        folder: the folder of all checkpoints.
        keep_last: how many stay when a new one has been written; None: all.
    """

    def __init__(self, folder: Path, keep_last: int | None = None):
        self.folder, self.keep_last = folder, keep_last
        self._checksums: dict[str, str] = {}  # checksums of a new checkpoint's files

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"checkpoint-{step}"

    def paths(self) -> list[Path]:
        """All checkpoints' folders, in ascending order of steps."""
        if not self.folder.is_dir():
            return []
        folders = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        return sorted(folders, key=step_of)

    @contextmanager
    def new(
        self,
        step: int,
        best: int | None = None,
        processes: Processes | None = None,
        *,
        on_each_node: bool = False,
    ) -> Iterator[Path]:
        """A folder to write a checkpoint to, which is there under its name after the block.

        Args:
            best: the step of a checkpoint that stays, however old it is.
            processes: processes that all write to the folder; it gets its name when all have.
            on_each_node: each machine has a folder of its own, with what its processes write.

        Raises:
            OSError: the checkpoint cannot be written, as on a full disk; earlier ones stay.
            PeerFailed: another process could not write its files.
        """
        processes = processes or OneProcess()
        with ExitStack() as stack:
            makes = processes.of_machine[0] == 0 if on_each_node else processes.is_main
            with processes.together():
                made = stack.enter_context(self._new(step, best)) if makes else Path()
            part = part_of(self.path(step)) if on_each_node else processes.from_main(made)
            with processes.together():
                yield part
            if not on_each_node:
                self.share_checksums(part, processes)
            with processes.together():
                stack.close()

    def share_checksums(self, part: Path, processes: Processes) -> None:
        """Computes the checksums of a new checkpoint's files for its manifest, each process those
        of a share of the files. All processes must call it, when the files are written.

        Raises:
            PeerFailed: another process answers no more.
        """
        if processes.count == 1:
            return
        with processes.together():
            main_sizes = _sizes(part) if processes.is_main else {}
        sizes = processes.from_main(main_sizes)
        names, sums = list(sizes), {}
        for i in processes.balanced(list(sizes.values()))[processes.index]:
            # A file that this machine does not see, or not yet whole, is left to the main process.
            with suppress(OSError):
                if (part / names[i]).stat().st_size == sizes[names[i]]:
                    sums[names[i]] = _sha256(part / names[i])
        self._checksums = {k: v for each in processes.objects(sums) for k, v in each.items()}

    @contextmanager
    def _new(self, step: int, best: int | None) -> Iterator[Path]:
        self._checksums = {}  # an earlier checkpoint's files have other ones
        self.folder.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()
        path = self.path(step)
        try:
            with new_folder(path) as part:
                yield part
                write_manifest(part, step, self._checksums)
        except Exception as error:
            if not _is_of_writing(error):
                raise
            last = next((p.name for p in reversed(self.paths())), None)
            kept = f"the last good checkpoint is {last}" if last else "there is none before it"
            raise OSError(f"{path} could not be saved ({error}); {kept}") from error
        self._drop_old({path} if best is None else {path, self.path(best)})

    def _drop_old(self, kept: set[Path]) -> None:
        paths = self.paths()
        old = [path for path in paths if path not in kept]
        if self.keep_last is not None:
            for path in old[: max(len(paths) - self.keep_last, 0)]:
                remove_folder(path)

    def newest_good(self, before: int | None = None) -> Path | None:
        """The newest checkpoint that is whole; None if there is none. A warning names each newer
        one, which is damaged.

        Args:
            before: a step; only those with fewer steps are looked at.
        """
        paths = [p for p in self.paths() if before is None or step_of(p) < before]
        return _first_whole(paths[::-1], OneProcess())

    def supersede(self, after_step: int) -> Path | None:
        """Moves checkpoints of later steps out of the way, to ``checkpoints.superseded-N``; returns
        that folder, or None if there are none."""
        later = [path for path in self.paths() if step_of(path) > after_step]
        if not later:
            return None
        target = free_name(self.folder.absolute(), "superseded")
        target.mkdir()
        for path in later:
            path.rename(target / path.name)
        return target

    def remove_unfinished(self) -> None:
        """Removes what a killed process left unfinished."""
        for path in (*self.folder.glob(".saving-*"), *self.folder.glob(".removed-*")):
            shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(
    resume: bool | str | Path,
    checkpoints: Checkpoints,
    kind: Kind = OF_PPO,
    processes: Processes | None = None,
) -> Path | None:
    """The checkpoint to resume from, which is whole; None where there is none yet.

    Args:
        resume: True, "true" or "latest": the newest good one of ``checkpoints``; or a checkpoint's
            folder, or a run's, whose newest good one is taken.
        kind: the kind of the trainer that resumes.
        processes: processes that all call this, and get the same. Those of a machine share the
            work.

    Raises:
        FileNotFoundError: there is no such folder, or no checkpoint in it.
        BadCheckpoint: the one that is named is damaged, or all of them are; one of another kind.
        PeerFailed: another process answers no more, or has met one of these errors.
    """
    processes = processes or OneProcess()
    with processes.together():
        candidates = _candidates(resume, checkpoints, kind) if processes.is_main else ([], False)
    paths, only = processes.from_main(candidates)
    checkpoint = _first_whole(paths, processes, only)
    if checkpoint is None and paths:
        raise BadCheckpoint(
            f"no checkpoint in {paths[0].parent} is whole: pass --overwrite (overwrite=True) to "
            "begin anew, or another checkpoint's folder to resume from that"
        )
    return checkpoint


def names_a_folder(resume: Any) -> bool:
    """Whether ``resume`` names a folder, and does not ask for the newest checkpoint."""
    return not isinstance(resume, bool) and str(resume).lower() not in (LATEST, "true")


def _candidates(
    resume: bool | str | Path, checkpoints: Checkpoints, kind: Kind
) -> tuple[list[Path], bool]:
    """Checkpoints to resume from, the newest first, and whether a single one was asked for."""
    named = names_a_folder(resume)
    if named:
        path = Path(str(resume))
        if not path.is_dir():
            raise FileNotFoundError(
                f"resume: there is no folder {path}; name a checkpoint or a run's folder, or leave "
                "out the name for the latest checkpoint of --output"
            )
        if step_of(path) >= 0 or (path / MANIFEST).exists():
            _check_kind(path, kind)
            return [path], True
        checkpoints = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    paths = checkpoints.paths()[::-1]
    for path in paths:
        _check_kind(path, kind)
    if named and not paths:
        raise FileNotFoundError(f"resume: {resume} holds no checkpoint")
    return paths, False


def _first_whole(paths: Sequence[Path], processes: Processes, only: bool = False) -> Path | None:
    """The first checkpoint that is whole for all processes, or None; warns of damaged ones before
    it, which are an error with ``only``."""
    for path in paths:
        wrong = None
        with processes.together():
            try:
                verify(path, processes.of_machine)
            except BadCheckpoint as error:
                wrong = str(error)
        wrong = next((x for x in processes.objects(wrong) if x is not None), None)
        if wrong is None:
            return path
        if only:
            raise BadCheckpoint(wrong)
        if processes.is_main:
            warnings.warn(f"{wrong}: it is not used", stacklevel=4)
    return None


def _check_kind(checkpoint: Path, kind: Kind) -> None:
    """Raises BadCheckpoint where another kind of trainer has written the checkpoint."""
    for other in (OF_PPO, OF_TRANSFORMERS):
        if other is not kind and (checkpoint / other.file).is_file():
            raise BadCheckpoint(
                f"resume: {checkpoint} is a checkpoint of {other.whose}, not of {kind.whose}: "
                f"resume it with the command that wrote it ({other.commands})"
            )


def check_identity(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Compares what a checkpoint says of its run with the run that resumes.

    Raises:
        BadCheckpoint: something differs; says what, and the remedy.
    """
    for name, our in ours.items():
        their = theirs.get(name)
        if their != our:
            shown = "" if len(str(our)) > 40 else f" ({their}, here {our})"
            differs = "differ" if name.endswith("s") else "differs"
            raise BadCheckpoint(
                f"resume: the checkpoint is of another run, whose {name} {differs}{shown}: "
                f"{_REMEDIES[name]}"
            )


def describe_weights(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Type and shape of weights, by name, for :func:`check_weights`."""
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        for name, x in weights.items()
    }


def check_weights(theirs: Mapping[str, str], ours: Mapping[str, str], what: str = "model") -> None:
    """Compares the weights that a checkpoint has with those of the model that it is loaded into.

    Args:
        what: the model, for messages.

    Raises:
        BadCheckpoint: a weight that only one of them has, or of another type or shape; names it.
    """
    for name in dict.fromkeys([*ours, *theirs]):
        their, our = (x.get(name, "none") for x in (theirs, ours))
        if their != our:
            raise BadCheckpoint(
                f"resume: the checkpoint is of another {what}, whose {name} is {their}, here {our}"
                f": resume with the {what}, adapter and dtype that the run began with"
            )


def step_of(path: Path) -> int:
    """The number of steps in a checkpoint's name; -1 for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def write_manifest(folder: Path, step: int, checksums: Mapping[str, str] | None = None) -> None:
    """Writes the manifest of a folder's files.

    Args:
        checksums: checksums of some of them.
    """
    checksums = checksums or {}
    files = {
        name: {"size": size, "sha256": checksums.get(name) or _sha256(folder / name)}
        for name, size in _sizes(folder).items()
    }
    content = {
        "format": FORMAT,
        "step": step,
        "files": files,
        "versions": versions(),
        "machine": machine(),
    }
    write_file(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def verify(folder: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Compares a checkpoint's files with its manifest, and returns that; opens no other file.

    Args:
        share: (i, n): of n processes that do so together this is the i-th. Each looks for all
            files, and computes the checksums of its share of them.

    Raises:
        BadCheckpoint: no manifest, a file that is missing, truncated or changed, or the format of a
            newer fastrl; names it.
    """
    manifest = read_manifest(folder)
    files = manifest["files"]
    for name, recorded in files.items():
        path = folder / name
        if not path.is_file():
            raise BadCheckpoint(f"{path} is missing")
        if path.stat().st_size != recorded["size"]:
            raise BadCheckpoint(
                f"{path} is damaged: it has {path.stat().st_size} bytes, not {recorded['size']}"
            )
    first, step = share
    for name in sorted(files, key=lambda name: (-files[name]["size"], name))[first::step]:
        if _known_sha256(folder / name) != files[name]["sha256"]:
            raise BadCheckpoint(f"{folder / name} is damaged: its checksum is not the manifest's")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest; raises BadCheckpoint where it is missing, damaged or too new."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        number, files = int(manifest["format"]), dict(manifest["files"])
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} is no whole checkpoint of fastrl: there is no {MANIFEST}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadCheckpoint(f"{folder / MANIFEST} is damaged") from None
    if number > FORMAT:
        raise BadCheckpoint(
            f"{folder} was written by a newer fastrl (format {number}, this one reads {FORMAT}): "
            "update fastrl"
        )
    return {**manifest, "files": files}


def warn_of_another_machine(manifest: dict[str, Any]) -> None:
    """Warns where machine or versions are not the checkpoint's, and of what may differ then."""
    before, now = manifest["machine"], machine()
    changes = [*differences(manifest["versions"], versions()), *differences(before, now)]
    if changes:
        remedy = remedies(before, now)
        warnings.warn(
            f"the checkpoint was saved under other conditions ({'; '.join(changes)}): what follows "
            "is the same computation, but its last bits may differ from those of an uninterrupted "
            "run"
            + other_draws(manifest["versions"])
            + (f"; start it with {remedy} for the checkpoint's conditions" if remedy else ""),
            stacklevel=3,
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of settings that differ from a checkpoint's, but those of ``OF_CODE`` that it lacks."""
    return [
        name
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
        and not (name.startswith(OF_CODE) and name not in before)
    ]


def warn_of_changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Warns of settings that are not those of the checkpoint; returns their names."""
    changed = changed_settings(before, now)
    if changed:
        shown = ", ".join(f"{k}: {before.get(k)} → {now.get(k)}" for k in changed)
        warnings.warn(
            f"resume: settings differ from the checkpoint's ({shown}): the run goes on with the "
            "new ones, and no longer as an uninterrupted one would have",
            stacklevel=6,
        )
    return changed


def _is_of_writing(error: Exception) -> bool:
    """Whether an error is the file system's; torch and safetensors have their own kinds of it."""
    kinds = (OSError, RuntimeError)
    return isinstance(error, kinds) or type(error).__name__ == "SafetensorError"


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _known_sha256(path: Path) -> str:
    """A file's SHA-256, computed once in a process as long as the file stays as it is: a command
    checks a checkpoint before it loads anything, and the trainer checks it again."""
    status = path.stat()
    return _sha256_of(str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ino)


@cache
def _sha256_of(path: str, *_state: int) -> str:
    return _sha256(Path(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
