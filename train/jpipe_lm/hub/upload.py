"""Upload an export to the Hugging Face Hub, after asking."""

import glob
import sys
from collections.abc import Callable
from pathlib import Path

from jpipe import InputError
from jpipe_lm.hub.download import LOG_IN, Name, parse, reported
from jpipe_train.console.terminal import count, printable

_WHERE = "--push"


def check(text: str, *, is_confirmed: bool) -> None:
    """Check that an upload is possible, before anything is exported.

    Args:
        text: the name to upload to, such as `hf:owner/name`.
        is_confirmed: whether `push` will not ask.

    Raises:
        InputError: it is no name of a whole model; nobody is logged in; or nobody can answer the question.
    """
    name = _whole(text)
    if not is_confirmed and not sys.stdin.isatty():
        raise InputError(where=_WHERE, expected="a terminal, to ask before the upload", found="none", change="add --yes")
    with reported(name, _WHERE, "upload"):
        from huggingface_hub import HfApi, get_token

        if get_token() is None:
            raise InputError(where=_WHERE, expected="a token that may write", found="none", change=LOG_IN)
        HfApi().whoami()


def push(text: str, path: Path, say: Callable[[str], None], *, is_confirmed: bool, is_public: bool) -> None:
    """Say what will be uploaded and who can read it, ask, and upload it.

    Args:
        text: the name to upload to. A model that does not exist is created.
        path: the file or folder to upload.
        say: prints a line.
        is_confirmed: whether to upload without asking.
        is_public: whether everyone can read a new model. Nothing changes who can read an existing one.

    Raises:
        InputError: the upload fails.
    """
    name, names = _whole(text), [path.name]
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in files]
    with reported(name, _WHERE, "upload"):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        api = HfApi()
        try:
            is_private, state = bool(api.model_info(name.repo).private), "exists"
        except RepositoryNotFoundError:
            is_private, state = not is_public, "is new"
        readers = "is private" if is_private else "is public: everyone can read it"
        say(f"{name} {state} and {readers}; to upload: {count(len(files), 'file')}, {sum(file.stat().st_size for file in files):,} bytes")
        for file in names:
            say(f"  {file}")
        if not is_confirmed and not _agrees(f"upload to {name}? [y/N] "):
            say(f"nothing was uploaded; the export is in {path}")
            return
        api.create_repo(name.repo, private=is_private, exist_ok=True)
        folder = path if path.is_dir() else path.parent
        patterns = [glob.escape(file) for file in names]
        commit = api.upload_folder(repo_id=name.repo, folder_path=folder, allow_patterns=patterns, commit_message="Add an export of jpipe")
    say(f"uploaded {name._replace(revision=commit.oid)}")


def _whole(text: str) -> Name:
    """Return the name of a whole model."""
    name = parse(text, _WHERE)
    if name != Name(name.repo, False, None, ""):
        raise InputError(where=_WHERE, expected="a model, as hf:OWNER/NAME", found=str(name), change="leave out the rest of the name")
    return name


def _agrees(question: str) -> bool:
    try:
        return input(printable(question)).strip().lower() in ("y", "yes")
    except EOFError:
        return False
