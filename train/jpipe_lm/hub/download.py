"""Find a model or data set of the Hugging Face Hub by name, and download the needed files. Nothing in them is executed.

huggingface_hub downloads into its cache, with its settings (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`). A name is first
pinned to a commit, which is what the config of a run records. One process of a machine downloads at a time; then the others find the
files in the cache. Each new file is compared with its hash.
"""

import contextlib
import functools
import glob
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import write_atomically
from jpipe_train.console.terminal import count, first_line

_LOG = logging.getLogger("jpipe")
_FORM = re.compile(
    r"hf:/{0,2}(?P<datasets>datasets/)?(?P<repo>(?!datasets/)[\w.-]+/[\w.-]+)(@(?P<revision>refs/\w+/[\w.-]+|[^/@]+))?(/(?P<path>[^/].*))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABOUT = (
    *("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "adapter_model.safetensors")
_ROWS = tuple(
    f"*.{ending}{packed}"
    for ending in ("parquet", "arrow", "feather", "jsonl", "ndjson", "json", "csv", "tsv", "txt")
    for packed in ("", ".gz", ".zst")
)


class Name(NamedTuple):
    """A model or data set of the Hub, and a file or folder in it.

    Attributes:
        repo: the repository, as `owner/name`.
        is_dataset: whether it is a data set.
        revision: a branch, tag or commit; None for the main branch.
        path: a file, a folder or, in a data set, a glob; "" for the whole repository.
    """

    repo: str
    is_dataset: bool
    revision: str | None
    path: str

    def __str__(self) -> str:
        revision, path = f"@{self.revision}" if self.revision else "", f"/{self.path}" if self.path else ""
        return f"hf:{'datasets/' if self.is_dataset else ''}{self.repo}{revision}{path}"

    @property
    def kind(self) -> str:
        """What the repository is, for messages."""
        return "data set" if self.is_dataset else "model"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of functions of huggingface_hub."""
        return {"repo_id": self.repo, "repo_type": "dataset" if self.is_dataset else "model", "revision": self.revision}


def parse(text: str, where: str) -> Name:
    """Read a name such as `hf:owner/name@revision/path` or `hf:datasets/owner/name/data/train-*.parquet`.

    Raise InputError if the text has another form.
    """
    match = _FORM.fullmatch(text)
    if match is None or not {"", ".", ".."}.isdisjoint((match["path"] or "-").split("/")):
        expected = "hf:OWNER/NAME or hf:datasets/OWNER/NAME, then perhaps @REVISION and /PATH"
        raise InputError(where=where, expected=expected, found=short(text), change="correct the name, or write ./ before a path")
    return Name(match["repo"], match["datasets"] is not None, match["revision"], match["path"] or "")


def pin(text: str, where: str, earlier: str | None = None) -> str:
    """Return the name with the hash of the commit that it means now.

    Args:
        text: a name, with or without a revision.
        where: the config key or option that has the name, for messages.
        earlier: what the config of a run that resumes has for this key. Its commit is kept if `text` has no revision.

    Raises:
        InputError: there is no such repository or revision, or no connection and nothing in the cache.
    """
    name = parse(text, where)
    if name.revision is None and earlier is not None and _FORM.fullmatch(earlier):
        before = parse(earlier, where)
        if before._replace(revision=None) == name:
            return earlier
    if name.revision is None or not _COMMIT.fullmatch(name.revision):
        with reported(name, where):
            from huggingface_hub import HfApi

            name = name._replace(revision=HfApi().resolve_revision(**name.arguments).resolved)
        if not _COMMIT.fullmatch(name.revision or ""):  # it becomes part of a path
            raise InputError(where=where, expected=f"a commit of {text}", found=short(name.revision), change="check HF_ENDPOINT")
    return str(name)


@functools.cache
def fetch(text: str, where: str) -> str:
    """Return the path of what a name means, after downloading it.

    A data set is downloaded with all files of rows, or with the files at the name's path. A model is downloaded without its weights, which
    `fetch_weights` adds.

    Args:
        text: a name; without the hash of a commit it is pinned first.
        where: the config key or option that has the name, for messages.

    Returns:
        A file, folder or glob in the cache.

    Raises:
        InputError: the files cannot be found, downloaded or stored.
    """
    name = parse(pin(text, where), where)
    path = name.path
    patterns: Sequence[str] = [path, f"{path}/*"] if path else _ROWS
    deeper: Sequence[str] = []
    if name.is_dataset and glob.has_magic(path):
        patterns = [path, path.replace("**/", "")]
        deeper = [] if "**" in path else ["*/" * (path.count("/") + 1) + "*"]  # for huggingface_hub * stands for folders, too
    elif not name.is_dataset:
        folders = (f"{path}/", f"{os.path.dirname(path)}/".lstrip("/")) if path else ("",)
        patterns = [path, *(f"{folder}{file}" for folder in folders for file in _ABOUT)]
    folder = _download(name, where, patterns, deeper)
    if not name.is_dataset:
        _fetched[folder / path] = name, where
    return os.path.join(glob.escape(str(folder)) if glob.has_magic(path) else folder, path).rstrip("/")


_fetched: dict[Path, tuple[Name, str]] = {}


def fetch_weights(folder: Path) -> None:
    """Download the weights of a model into a folder that `fetch` has returned. Nothing happens for any other folder.

    Raise InputError if the files cannot be downloaded or stored.
    """
    if (known := _fetched.get(folder.resolve())) is not None:
        name, where = known
        _download(name, where, [os.path.join(name.path, file) for file in _WEIGHTS])


def _download(name: Name, where: str, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """Download the files that match and are not in the cache, and return the folder of the whole repository in the cache."""
    with reported(name, where), contextlib.ExitStack() as stack:
        from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
        from huggingface_hub.errors import DryRunError
        from huggingface_hub.utils import WeakFileLock, tqdm  # type: ignore[attr-defined]

        class Silent(tqdm):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options | {"disable": True})

        wanted = {**name.arguments, "allow_patterns": [*filter(None, patterns)], "ignore_patterns": [*ignored]}
        lock = Path(constants.HF_HUB_CACHE, ".locks", str(name._replace(path="", revision=None)).replace("/", "--"), "jpipe.lock")
        with contextlib.suppress(OSError):  # nobody downloads into a cache that is read-only
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(lock))
        try:
            files = snapshot_download(**wanted, tqdm_class=Silent, dry_run=True)
        except DryRunError:  # without a connection; the next call finds everything in the cache, or says what is missing
            files = []
            if name.is_dataset:
                get_cached_repo_tree(**name.arguments)  # without it, huggingface_hub takes part of a data set for all of it
        missing = [file for file in files if not os.path.lexists(file.local_path)]
        journal = lock.with_name("jpipe-unchecked.json")  # a process that ended early did not check these
        unchecked = [*(json.loads(journal.read_text()) if journal.exists() else []), *(file.local_path for file in missing)]
        if missing:
            write_atomically(journal, json.dumps(unchecked))
            size = sum(file.file_size or 0 for file in missing)
            _LOG.warning("%s: downloading %s, %s bytes, to %s", name, count(len(missing), "file"), f"{size:,}", constants.HF_HUB_CACHE)
        bar = tqdm if missing and sys.stderr.isatty() else Silent
        folder = Path(snapshot_download(**wanted, tqdm_class=bar)).resolve()
        if problems := [problem for file in dict.fromkeys(unchecked) if (problem := _wrong_hash(Path(file), name, where)) is not None]:
            raise problems[0]
        if unchecked:
            journal.unlink()
        if not folder.is_dir() or (files == [] and name.path and not glob.glob(str(folder / name.path))):
            raise InputError(where=where, expected=f"files in {name} that jpipe reads", found="none", change="check the path")
        return folder


def _wrong_hash(file: Path, name: Name, where: str) -> InputError | None:
    """Compare a file with its hash, which is the name of the file that its link points to. If they differ, remove the file."""
    if not os.path.lexists(file):
        return None
    stored = file.parent / os.readlink(file) if file.is_symlink() else file
    kind = {64: "sha256", 40: "sha1"}.get(len(stored.name))
    if stored == file or kind is None:
        return None
    with open(file, "rb") as opened:
        header = b"" if kind == "sha256" else b"blob %d\0" % os.fstat(opened.fileno()).st_size  # as git does
        start = hashlib.new(kind, header, usedforsecurity=False)
        found = hashlib.file_digest(opened, lambda: start).hexdigest()
    if found == stored.name:
        return None
    file.unlink()
    stored.unlink(missing_ok=True)
    return InputError(
        where=where,
        expected=f"'{file.name}' of {name} with the {kind} {stored.name}",
        found=f"{found}; the file was removed",
        change="run the command again; if it fails again, a proxy or the server changes files (HF_ENDPOINT)",
    )


LOG_IN = "log in with hf auth login, or set HF_TOKEN"
_AGAIN = "check the disk (HF_HUB_CACHE) and the connection, and run the command again; complete files are kept"


@contextlib.contextmanager
def reported(name: Name, where: str, verb: str = "download") -> Iterator[None]:
    """Convert the errors of huggingface_hub about a name into `InputError`s."""
    cannot = f"cannot {verb} {name}"
    try:
        from huggingface_hub import errors

        without_files = errors.IncompleteSnapshotError, errors.CachedRepoTreeNotFoundError, errors.RevisionResolutionError
    except (ImportError, AttributeError):
        change = "pip install 'jpipe-train[hub]'"
        raise InputError(f"{cannot}: huggingface_hub is not installed, or too old", where=where, change=change) from None
    try:
        yield
    except InputError:
        raise
    except errors.GatedRepoError as error:
        change = f"accept its terms on its page, then {LOG_IN}"
        raise InputError(where=where, expected=f"access to {name}", found=f"a gated {name.kind}", change=change) from error
    except errors.RepositoryNotFoundError as error:
        change = f"correct the name; for a private one, {LOG_IN}"
        raise InputError(where=where, expected=f"the {name.kind} {name}", found="none, or a private one", change=change) from error
    except errors.RevisionNotFoundError as error:
        change = "give a branch, a tag or a commit"
        raise InputError(where=where, expected=f"the revision of {name}", found="none", change=change) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, *without_files) as error:
        kind = "--repo-type dataset " if name.is_dataset else ""
        raise InputError(
            where=where,
            expected=f"{name} in the cache, or a connection to the Hub",
            found=f"neither: {first_line(error)}",
            change=f"connect this machine, or fill its cache (hf download {kind}{name.repo}) and set HF_HUB_OFFLINE=1",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        problem = f"{cannot}: the server answers {status}, {short(error.server_message or first_line(error))}"
        answered = InputError(problem, where=where, change=LOG_IN if status in (401, 403) else "try again later")
        answered.may_pass = status == 429 or status >= 500  # type: ignore[attr-defined]
        raise answered from error
    except OSError as error:
        raise InputError(f"{cannot}: {error.strerror or first_line(error)}", where=where, change=_AGAIN) from error
    except Exception as error:
        change = "use another repository" if isinstance(error, ValueError) else _AGAIN
        raise InputError(f"{cannot}: {type(error).__name__}: {first_line(error)}", where=where, change=change) from error
